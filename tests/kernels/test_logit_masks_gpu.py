"""Masks of grammars on logits: the kernel and its reference against plain Python."""

from types import ModuleType

import pytest
import torch

from outrider.kernels import logit_masks, logit_masks_gpu
from outrider.kernels.logit_edits import MASKED
from outrider.kernels.logit_masks import DEAD, FREE

from .step_model import DEVICE

over_both = pytest.mark.parametrize(
    ("module", "device"),
    [(logit_masks, torch.device("cpu")), (logit_masks_gpu, DEVICE)],
    ids=["torch", "gpu"],
)


@over_both
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 2048, 5003])
def test_bits_say_what_stays(module: ModuleType, device: torch.device, vocab: int) -> None:
    """Masks in another order than the rows, one of them of two rows."""
    generator = torch.Generator().manual_seed(vocab)
    words = logit_masks.mask_words(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (4, words), generator=generator, dtype=torch.int32)
    masks[1] = -1
    places = torch.tensor([2, 1, FREE, DEAD, 0, 2], dtype=torch.int32)
    wanted = logits.clone()
    for row, place in enumerate(places.tolist()):
        for token in range(vocab):
            if place >= 0 and not (int(masks[place, token // 32]) >> token % 32) & 1:
                wanted[row, token] = MASKED
    wanted[3] = torch.nan
    masked = logits.to(device)
    module.mask_logits(masked, places.to(device), masks.to(device))
    assert torch.equal(masked.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))
    for row in (1, 2):
        assert torch.equal(masked[row].cpu(), logits[row])


@over_both
def test_masks_of_another_shape_are_refused(module: ModuleType, device: torch.device) -> None:
    def check(rows: int, places: int, words: int) -> None:
        module.mask_logits(
            torch.zeros(rows, 64, device=device),
            torch.zeros(places, dtype=torch.int32, device=device),
            torch.zeros(2, words, dtype=torch.int32, device=device),
        )

    for rows, places, words in ((2, 2, 3), (2, 1, 2), (2, 3, 2)):
        with pytest.raises(ValueError, match="masks are"):
            check(rows, places, words)
    check(0, 0, 2)


@pytest.mark.gpu
def test_a_wide_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 151_936, device="cuda")
    words = logit_masks.mask_words(151_936)
    masks = torch.randint(-(2**31), 2**31, (256, words), dtype=torch.int32, device="cuda")
    places = torch.randint(-2, 256, (256,), generator=generator, dtype=torch.int32).cuda()
    wanted = logits.clone()
    logit_masks.mask_logits(wanted, places, masks)
    logit_masks_gpu.mask_logits(logits, places, masks)
    assert torch.equal(logits.nan_to_num(7.0), wanted.nan_to_num(7.0))
