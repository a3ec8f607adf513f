"""How sure a block draft's confidence head is of its drafts, in one Triton launch, a program a
draft.
"""

import torch
import triton
import triton.language as tl

_LARGEST_BLOCK = 1024


@triton.jit
def _confidence_logits(
    weight: tl.tensor,
    bias: tl.tensor,
    before: tl.tensor,
    hidden: tl.tensor,
    bonus: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    drafts: tl.tensor,
    vocab: tl.tensor,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    draft = tl.program_id(1)
    place = draft.to(tl.int64) * rows + row
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for low in range(0, HIDDEN, BLOCK):
        column = low + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        state = tl.load(hidden + place * HIDDEN + column, mask=inside, other=0.0)
        total += state.to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0)
    logit = tl.sum(total, 0) + tl.load(bias)
    if RANK > 0:
        if draft == 0:
            token = tl.load(bonus + row).to(tl.int64)
        else:
            token = tl.load(tokens + place - rows).to(tl.int64)
        token = tl.where((token >= 0) & (token < vocab), token, 0)
        column = tl.arange(0, RANK_BLOCK)
        inside = column < RANK
        embedded = tl.load(before + token * RANK + column, mask=inside, other=0.0)
        part = tl.load(weight + HIDDEN + column, mask=inside, other=0.0)
        logit += tl.sum(embedded.to(tl.float32) * part, 0)
    tl.store(out + row * drafts + draft, logit)


def confidence_logits(
    weight: torch.Tensor,
    bias: torch.Tensor,
    before: torch.Tensor | None,
    hidden: torch.Tensor,
    bonus: torch.Tensor,
    tokens: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """float32[R, D] of D drafts, see the reference.

    A token outside the vocabulary, which is padding, reads row 0 of ``before``. ``pdl``:
    programmatic dependent launch (Hopper and later). Raises ValueError for tensors that are not
    contiguous, and for a weight that is not float32 or of another length.
    """
    drafts, rows, size = hidden.shape
    rank = 0 if before is None else before.shape[1]
    if weight.dtype != torch.float32 or weight.shape != (size + rank,):
        raise ValueError(f"weight is {weight.dtype} {tuple(weight.shape)}, not of {size + rank}")
    given = {"weight": weight, "before": before, "hidden": hidden, "bonus": bonus, "tokens": tokens}
    for name, tensor in given.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
    out = torch.empty(rows, drafts, dtype=torch.float32, device=hidden.device)
    if rows and drafts:
        block = min(triton.next_power_of_2(size), _LARGEST_BLOCK)
        _confidence_logits[(rows, drafts)](
            weight,
            bias,
            before,
            hidden,
            bonus,
            tokens,
            out,
            rows,
            drafts,
            0 if before is None else before.shape[0],
            HIDDEN=size,
            RANK=rank,
            BLOCK=block,
            RANK_BLOCK=triton.next_power_of_2(max(rank, 1)),
            PDL=pdl,
            num_warps=max(block // 256, 1),
            launch_pdl=pdl,
        )
    return out
