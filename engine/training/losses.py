"""The loss of drafted distributions against the target's, with its gradient made on the way.

Logits of a whole batch are gigabytes. So a row's gradient is formed as soon as its logits are
there, multiplied back through the head at once, and nothing as wide as the vocabulary is kept.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .compiled import compiled

_CHUNK_ELEMENTS = 1 << 30
_CHUNK_ELEMENTS_CPU = 1 << 24


class Wanted(NamedTuple):
    """The target's answer at a step's rows.

    ``logits`` [B, R, Vd] over the draft's vocabulary; ``top`` int64[B, R]: the target's first
    choice, an index of that vocabulary, or Vd and above where it lies outside.
    """

    logits: torch.Tensor
    top: torch.Tensor


def drafted_loss(
    head_input: torch.Tensor,
    head: torch.Tensor,
    wanted: Wanted,
    weight: torch.Tensor,
    hard: float,
    lk: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of rows' losses, and bool[B, R]: whether draft and target choose alike.

    ``head_input`` [B, R, H], ``head`` [Vd, H], ``weight`` float32[B, R]. Rows whose ``top`` is
    outside the draft's vocabulary should weigh nothing. The loss is the cross-entropy to (1 - hard)
    of the target's distribution and ``hard`` of its first choice; with ``lk`` a part of it, larger
    as the two overlap more, is exchanged for their total variation distance.
    """
    loss, agree = _DraftedLoss.apply(head_input, head, *wanted, weight, hard, lk)  # type: ignore[no-untyped-call]
    return loss, agree


@torch.no_grad()
def agreement(head_input: torch.Tensor, head: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """bool[B, R]: whether the draft's first choice is ``top``."""
    return first_choices(head_input, head) == top


@torch.no_grad()
def first_choices(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """int64[B, R] of hidden states [B, R, H]."""
    parts = torch.split(hidden, chunk_size(hidden, head))
    return torch.cat([F.linear(part, head).argmax(-1) for part in parts])


@torch.no_grad()
def surprise(hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32[B, T]: 1 - the probability of each token of rows ids [B, T] behind those before it.

    ``hidden`` [B, T, H]: the states before the head [V, H]. 0 for a row's first token.
    """
    rows = compiled(_improbable) if hidden.device.type == "cuda" else _improbable
    parts = torch.split(hidden[:, :-1], chunk_size(hidden, head))
    tokens = torch.split(ids[:, 1:], chunk_size(hidden, head))
    found = [rows(F.linear(part, head), chosen) for part, chosen in zip(parts, tokens, strict=True)]
    return F.pad(torch.cat(found), (1, 0))


def start_weights(surprise: torch.Tensor, fits: torch.Tensor, focus: float) -> torch.Tensor:
    """float32[B, R]: how often serving drafts behind each token, where ``fits`` bool[B, R]; 1 on
    average over a row.

    A round begins behind a token that was not foreseen: ``focus`` of the weight goes by
    ``surprise`` [B, R], the rest is the same for all.
    """
    found = surprise * fits
    mean = found.sum(1, keepdim=True) / fits.sum(1, keepdim=True).clamp(min=1)
    return (1.0 - focus) + focus * surprise / mean.clamp(min=1e-9)


def _improbable(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    wide = logits.float()
    chosen = wide.gather(-1, tokens[..., None])[..., 0]
    return 1.0 - (chosen - torch.logsumexp(wide, -1)).exp()


class _DraftedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head_input: torch.Tensor,
        head: torch.Tensor,
        logits: torch.Tensor,
        top: torch.Tensor,
        weight: torch.Tensor,
        hard: float,
        lk: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = compiled(row_loss) if head_input.device.type == "cuda" else row_loss
        grad_input = torch.empty_like(head_input)
        grad_head = None
        if ctx.needs_input_grad[1]:
            grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        losses: list[torch.Tensor] = []
        agrees: list[torch.Tensor] = []
        size = chunk_size(head_input, head)
        for begin in range(0, head_input.shape[0], size):
            part = slice(begin, begin + size)
            grad, loss, agree = rows(
                F.linear(head_input[part], head),
                logits[part],
                top[part].contiguous(),
                weight[part],
                hard,
                lk,
            )
            grad_input[part] = grad @ head
            if grad_head is not None:
                grad_head += grad.flatten(0, 1).t() @ head_input[part].flatten(0, 1)
            losses.append(loss)
            agrees.append(agree)
        ctx.save_for_backward(grad_input, grad_head)
        ctx.head_dtype = head.dtype
        agree = torch.cat(agrees)
        ctx.mark_non_differentiable(agree)
        return torch.stack(losses).sum(), agree

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        grad_input, grad_head = ctx.saved_tensors
        of_head = None if grad_head is None else (grad_head * grad).to(ctx.head_dtype)
        return (grad_input * grad.to(grad_input.dtype), of_head, None, None, None, None, None)


def row_loss(
    drafted: torch.Tensor,
    target: torch.Tensor,
    top: torch.Tensor,
    weight: torch.Tensor,
    hard: float,
    lk: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of drafted logits [B, R, Vd], the weighted loss, bool[B, R] agreement."""
    wide, other = drafted.float(), target.float()
    sums = torch.logsumexp(wide, -1, keepdim=True)
    q = (wide - sums).exp()
    p = (other - torch.logsumexp(other, -1, keepdim=True)).exp()
    chosen = torch.arange(wide.shape[-1], device=wide.device) == top[..., None]
    wanted = (1.0 - hard) * p + hard * chosen
    loss = sums[..., 0] * wanted.sum(-1) - (wanted * wide).sum(-1)
    grad = q * wanted.sum(-1, keepdim=True) - wanted
    if lk:
        overlap = torch.minimum(p, q).sum(-1, keepdim=True)
        share = (-3.0 * overlap).exp()
        below = q * (q < p)
        of_distance = q * below.sum(-1, keepdim=True) - below
        grad = share * grad + (1.0 - share) * of_distance
        loss = share[..., 0] * loss + (1.0 - share[..., 0]) * (1.0 - overlap[..., 0])
    agree = wide.argmax(-1) == top
    return (grad * weight[..., None]).to(drafted.dtype), (loss * weight).sum(), agree


def chunk_size(head_input: torch.Tensor, head: torch.Tensor) -> int:
    """Sequences [R, H] of a chunk; all chunks are alike where a power of two divides the batch."""
    batch, rows, _ = head_input.shape
    limit = _CHUNK_ELEMENTS if head_input.device.type == "cuda" else _CHUNK_ELEMENTS_CPU
    size = batch
    while size > 1 and size * rows * head.shape[0] > limit:
        size = (size + 1) // 2
    return size
