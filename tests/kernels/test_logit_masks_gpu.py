"""Masks of grammars on logits: the kernel and its reference against plain Python."""

from types import ModuleType

import pytest
import torch

from outrider.kernels import logit_masks, logit_masks_gpu
from outrider.kernels.logit_edits import MASKED

from .step_model import DEVICE

over_both = pytest.mark.parametrize(
    ("module", "device"),
    [(logit_masks, torch.device("cpu")), (logit_masks_gpu, DEVICE)],
    ids=["torch", "gpu"],
)


@over_both
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 2048, 5003])
def test_bits_say_what_stays(module: ModuleType, device: torch.device, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    words = logit_masks.mask_words(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (5, words), generator=generator, dtype=torch.int32)
    masks[:, -1] = 0
    masks[1, :-1] = -1
    masks[3] = 0
    masks[3, -1] = 1
    wanted = logits.clone()
    for row in range(5):
        for token in range(vocab):
            if not (int(masks[row, token // 32]) >> token % 32) & 1:
                wanted[row, token] = MASKED
    wanted[3] = torch.nan
    masked = logits.to(device)
    module.mask_logits(masked, masks.to(device))
    assert torch.equal(masked.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(masked[1].cpu(), logits[1])


@over_both
def test_masks_of_another_vocabulary_are_refused(module: ModuleType, device: torch.device) -> None:
    with pytest.raises(ValueError, match="masks are"):
        module.mask_logits(
            torch.zeros(2, 64, device=device), torch.zeros(2, 2, dtype=torch.int32, device=device)
        )
    module.mask_logits(
        torch.zeros(0, 64, device=device), torch.zeros(0, 3, dtype=torch.int32, device=device)
    )


@pytest.mark.gpu
def test_a_wide_batch() -> None:
    logits = torch.randn(256, 151_936, device="cuda")
    words = logit_masks.mask_words(151_936)
    masks = torch.randint(-(2**31), 2**31, (256, words), dtype=torch.int32, device="cuda")
    masks[:, -1] = 0
    wanted = logits.clone()
    logit_masks.mask_logits(wanted, masks)
    logit_masks_gpu.mask_logits(logits, masks)
    assert torch.equal(logits, wanted)
