# mypy: disable-error-code="no-untyped-call"
"""Masks of what grammars allow on logits, on a GPU."""

import torch
import triton
import triton.language as tl

from .logit_masks import check_masks

_MASKED = tl.constexpr(torch.finfo(torch.float32).min)
_BLOCK = 2048


def mask_logits(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Mask float32[N, V] in place; see the reference. Raises ValueError."""
    check_masks(logits, masks)
    nodes, vocab = logits.shape
    if nodes:
        _mask_rows[(nodes, triton.cdiv(vocab, _BLOCK))](
            logits, masks, vocab, masks.shape[1], BLOCK=_BLOCK, num_warps=4
        )


@triton.jit
def _mask_rows(
    logits: tl.tensor, masks: tl.tensor, vocab: tl.tensor, words: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    word = tl.load(masks + row * words + (column >> 5), mask=inside, other=0)
    dead = tl.load(masks + row * words + words - 1) != 0
    at = logits + row * vocab + column
    x = tl.load(at, mask=inside, other=0.0)
    x = tl.where((word >> (column & 31)) & 1 == 1, x, _MASKED)
    x = tl.where(dead, float("nan"), x)
    tl.store(at, x, mask=inside)
