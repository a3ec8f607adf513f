"""Made-up survival: kernel and reference agree, chances mean what they say, drafts repeat."""

import itertools

import pytest
import torch

from outrider.kernels import simulate_survival, simulate_survival_gpu

from .step_model import DEVICE

ROOT = 0.25  # mean chance 1 / (1 + ROOT) = 0.8


def run(slots: list[int], lengths: list[int], gpu: bool = False) -> tuple[torch.Tensor, ...]:
    device = DEVICE if gpu else "cpu"
    logits = torch.full((len(slots), 7), torch.nan, device=device)
    lens = torch.zeros(len(slots), dtype=torch.int32, device=device)
    (simulate_survival_gpu if gpu else simulate_survival).simulate_survival(
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        root=ROOT,
        logits=logits,
        lens=lens,
    )
    return logits.cpu(), lens.cpu()


def test_the_kernel_is_the_reference() -> None:
    slots, lengths = [0, 3, 7, 2, 1], [5, 60, 63, 900, 100_000, 64, 1, 127]
    expected, found = run(slots, lengths), run(slots, lengths, gpu=True)
    torch.testing.assert_close(found[0], expected[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(found[1], expected[1])


def test_chances_have_the_mean_and_tell_what_holds() -> None:
    rows = 20_000
    logits, lens = run(list(range(rows)), [(37 * row) % 3000 for row in range(rows)])
    chance = logits.sigmoid()
    assert float(chance.mean()) == pytest.approx(1 / (1 + ROOT), abs=0.01)
    assert float(chance.min()) < 0.4
    survival = chance.cumprod(dim=1)
    for k in range(7):
        holds = (lens > k + 1).float()
        assert float(holds.mean()) == pytest.approx(float(survival[:, k].mean()), abs=0.01)
        low = survival[:, k] < survival[:, k].median()
        assert float(holds[low].mean()) == pytest.approx(float(survival[low, k].mean()), abs=0.015)
        assert float(holds[low].mean()) < float(holds[~low].mean()) - 0.1


def test_a_draft_holds_or_not_whenever_it_is_tried() -> None:
    """A row that stops somewhere stops there from the place of any earlier token."""
    lens = [int(run([0], [length])[1]) for length in range(200)]
    for one, behind in itertools.pairwise(lens):
        if 1 < one < 8:
            assert behind == one - 1
