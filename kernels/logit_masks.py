"""Masks of what grammars allow on logits, in torch: the reference of `logit_masks_gpu`."""

import torch

from .logit_edits import MASKED

WORD = 32
FREE, DEAD = -1, -2  # in place of a mask: everything is allowed, nothing is


def mask_words(vocab: int) -> int:
    """int32 words of a mask: a bit a token."""
    return -(-vocab // WORD)


def mask_logits(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """Mask float32[N, V] in place: row n where the bits of ``masks[places[n]]`` are 0.

    ``masks`` int32[M, W]: token t is bit t % 32 of word t // 32. ``places`` int32[N]: below M, FREE
    for rows that stay as they are, or DEAD for those whose logits become NaN. Raises ValueError
    unless W is ``mask_words(V)``.
    """
    check_masks(logits, places, masks)
    rows = (places >= 0).nonzero().flatten()
    shifts = torch.arange(WORD, device=masks.device, dtype=torch.int32)
    bits = (masks[places[rows].long(), :, None] >> shifts) & 1
    masked = logits[rows].masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, MASKED)
    logits[rows] = masked
    logits.masked_fill_((places == DEAD)[:, None], torch.nan)


def check_masks(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """Raises ValueError for masks of another vocabulary, or of other rows, than the logits'."""
    rows, vocab = logits.shape
    if tuple(places.shape) != (rows,) or masks.shape[1] != mask_words(vocab):
        shapes = f"{tuple(masks.shape)} at {tuple(places.shape)}"
        raise ValueError(f"masks are {shapes}, not of {mask_words(vocab)} words at {rows} rows")
