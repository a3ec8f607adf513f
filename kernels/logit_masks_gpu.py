# mypy: disable-error-code="no-untyped-call"
"""Masks of what grammars allow on logits, on a GPU."""

import torch
import triton
import triton.language as tl

from .logit_masks import DEAD, check_masks

_MASKED = tl.constexpr(torch.finfo(torch.float32).min)
_DEAD = tl.constexpr(DEAD)
_BLOCK = 2048


def mask_logits(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """Mask float32[N, V] in place; see the reference. Raises ValueError."""
    check_masks(logits, places, masks)
    nodes, vocab = logits.shape
    if nodes:
        _mask_rows[(nodes, triton.cdiv(vocab, _BLOCK))](
            logits, places, masks, vocab, masks.shape[1], BLOCK=_BLOCK, num_warps=4
        )


@triton.jit
def _mask_rows(
    logits: tl.tensor,
    places: tl.tensor,
    masks: tl.tensor,
    vocab: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    at = logits + row * vocab + column
    place = tl.load(places + row).to(tl.int64)
    if place >= 0:
        word = tl.load(masks + place * words + (column >> 5), mask=inside, other=0)
        x = tl.load(at, mask=inside, other=0.0)
        tl.store(at, tl.where((word >> (column & 31)) & 1 == 1, x, _MASKED), mask=inside)
    elif place == _DEAD:
        tl.store(at, tl.full((BLOCK,), float("nan"), tl.float32), mask=inside)
