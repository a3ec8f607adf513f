"""The loss of blocks of drafted distributions, with its gradient made on the way.

Like losses.py: nothing as wide as the vocabulary outlives its chunk, the target's logits included.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .block_weighting import dpace_weights
from .compiled import compiled
from .losses import chunk_size


class Objective(NamedTuple):
    """What a row's loss is made of: cross-entropy and total variation distance to the wanted
    distribution, which has ``hard`` on the target's first choice and the rest as the target has it.

    ``lk``: instead of by their weights, the two are mixed by how far the distributions overlap.
    ``greedy``: the part of a draft's ``chance`` that is greedy acceptance, the rest is that of
    rejection sampling.
    ``survival_floor``: what a token weighs behind one that the target would not have chosen.
    ``dpace_alpha``: tokens are weighed by D-PACE; None: by what the caller gives.
    """

    cross_entropy: float
    variation: float
    lk: bool
    hard: float
    greedy: float
    survival_floor: float
    dpace_alpha: float | None


class Drafted(NamedTuple):
    """N blocks of K drafted tokens: ``hidden`` [N, K, H] under the target's ``head`` [V, H], and
    with a Markov head ``latent`` [N, K, r] under ``table`` [V, r].
    """

    hidden: torch.Tensor
    head: torch.Tensor
    latent: torch.Tensor | None = None
    table: torch.Tensor | None = None


class BlockLoss(NamedTuple):
    """``loss``: the weighted sum. All others [N, K]: ``agree``: whether the draft's first choice is
    the target's; ``chance``: of the draft being accepted; ``alive``: what of a token's weight the
    text's departures have left.
    """

    loss: torch.Tensor
    agree: torch.Tensor
    chance: torch.Tensor
    alive: torch.Tensor


def block_loss(
    drafted: Drafted,
    target: torch.Tensor,
    text: torch.Tensor,
    weight: torch.Tensor,
    objective: Objective,
) -> BlockLoss:
    """``target`` [N, K, H]: the target's hidden states before the head; ``text`` int64[N, K]: the
    tokens that follow in the text; ``weight`` float32[N, K], 0 where a token says nothing.
    """
    found = _BlockLoss.apply(*drafted, target, text, weight, objective)  # type: ignore[no-untyped-call]
    return BlockLoss(*found)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        latent: torch.Tensor | None,
        table: torch.Tensor | None,
        target: torch.Tensor,
        text: torch.Tensor,
        weight: torch.Tensor,
        objective: Objective,
    ) -> tuple[torch.Tensor, ...]:
        rows = compiled(block_rows) if hidden.device.type == "cuda" else block_rows
        grad_hidden = torch.empty_like(hidden)
        grad_latent = grad_table = None
        if latent is not None and table is not None:
            grad_latent = torch.empty_like(latent)
            grad_table = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
        parts: list[tuple[torch.Tensor, ...]] = []
        size = chunk_size(hidden, head)
        for begin in range(0, len(hidden), size):
            part = slice(begin, begin + size)
            logits = F.linear(hidden[part], head)
            if latent is not None and table is not None:
                logits = logits + F.linear(latent[part], table)
            grad, *found = rows(
                logits, F.linear(target[part], head), text[part], weight[part], *objective
            )
            parts.append(tuple(found))
            grad_hidden[part] = grad @ head
            if latent is not None and table is not None:
                assert grad_latent is not None
                assert grad_table is not None
                grad_latent[part] = grad @ table
                grad_table += grad.flatten(0, 1).t() @ latent[part].flatten(0, 1)
        ctx.save_for_backward(grad_hidden, grad_latent, grad_table)
        ctx.table_dtype = None if table is None else table.dtype
        losses, *others = zip(*parts, strict=True)
        made = tuple(torch.cat(part) for part in others)
        ctx.mark_non_differentiable(*made)
        return (torch.stack(losses).sum(), *made)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        hidden, latent, table = (
            None if part is None else part * grad.to(part.dtype) for part in ctx.saved_tensors
        )
        table = None if table is None else table.to(ctx.table_dtype)
        return (hidden, None, latent, table, None, None, None, None)


def block_rows(
    drafted: torch.Tensor,
    target: torch.Tensor,
    text: torch.Tensor,
    weight: torch.Tensor,
    cross_entropy: float,
    variation: float,
    lk: bool,
    hard: float,
    greedy: float,
    survival_floor: float,
    dpace_alpha: float | None,
) -> tuple[torch.Tensor, ...]:
    """The gradient of drafted logits [N, K, V], then a BlockLoss; arguments as above."""
    wide, other = drafted.float(), target.float()
    sums = torch.logsumexp(wide, -1, keepdim=True)
    q = (wide - sums).exp()
    p = (other - torch.logsumexp(other, -1, keepdim=True)).exp()
    top = other.argmax(-1)
    follows = torch.where(text == top, 1.0, survival_floor)
    alive = F.pad(follows[:, :-1], (1, 0), value=1.0).cumprod(-1)
    chosen = torch.arange(wide.shape[-1], device=wide.device) == top[..., None]
    weight = weight * alive
    if dpace_alpha is not None:
        of_top = torch.where(chosen, q, 0.0).sum(-1)
        weight = weight * dpace_weights(of_top, weight > 0, dpace_alpha)
    wanted = (1.0 - hard) * p + hard * chosen
    overlap = torch.minimum(wanted, q).sum(-1)
    below = q * (q < wanted)
    of_variation = q * below.sum(-1, keepdim=True) - below
    loss = sums[..., 0] - (wanted * wide).sum(-1)
    if lk:
        share = (-3.0 * overlap).exp()
        grad = share[..., None] * (q - wanted) + (1.0 - share[..., None]) * of_variation
        loss = share * loss + (1.0 - share) * (1.0 - overlap)
    else:
        grad = cross_entropy * (q - wanted) + variation * of_variation
        loss = cross_entropy * loss + variation * (1.0 - overlap)
    agree = wide.argmax(-1) == top
    chance = (1.0 - greedy) * torch.minimum(p, q).sum(-1) + greedy * agree
    return (
        (grad * weight[..., None]).to(drafted.dtype),
        (loss * weight).sum(),
        agree,
        chance,
        alive,
    )
