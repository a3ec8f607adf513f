"""Masks of what grammars allow on logits, in torch: the reference of `logit_masks_gpu`."""

import torch

from .logit_edits import MASKED

WORD = 32


def mask_words(vocab: int) -> int:
    """int32 words of a node's mask: a bit a token, and one word that says that no bit is set."""
    return -(-vocab // WORD) + 1


def allow_all(masks: torch.Tensor) -> None:
    """Make ``masks`` int32[N, W] forbid nothing."""
    masks.fill_(-1)
    masks[:, -1] = 0


def mask_logits(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Mask float32[N, V] in place where the bits of ``masks`` int32[N, W] are 0.

    Token t is bit t % 32 of word t // 32. The last word is 1 in rows without any bit, whose
    logits become NaN, and 0 elsewhere. Raises ValueError unless W is ``mask_words(V)``.
    """
    vocab = logits.shape[1]
    check_masks(logits, masks)
    shifts = torch.arange(WORD, device=masks.device, dtype=torch.int32)
    bits = (masks[:, :-1, None] >> shifts) & 1
    logits.masked_fill_(bits.flatten(1)[:, :vocab] == 0, MASKED)
    logits.masked_fill_((masks[:, -1] != 0)[:, None], torch.nan)


def check_masks(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """Raises ValueError for masks of another shape than the logits'."""
    wanted = logits.shape[0], mask_words(logits.shape[1])
    if tuple(masks.shape) != wanted:
        raise ValueError(f"masks are {tuple(masks.shape)}, not {wanted}")
