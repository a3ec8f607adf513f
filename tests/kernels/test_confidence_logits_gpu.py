"""Confidence of block drafts: in torch and in Triton, against float64."""

import pytest
import torch

from outrider.kernels import confidence_logits as confidence_logits_torch
from outrider.kernels.confidence_logits_gpu import confidence_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 11
SIZES = [(1, 1), (3, 5), (8, 8), (7, 9), (1023, 3), (1024, 4), (1025, 16), (2500, 17)]


def cases(
    drafts: int, rows: int, size: int, rank: int, dtype: torch.dtype
) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(drafts + 7 * rows + 31 * size + rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.randint(0, VOCAB, (1 + drafts, rows), generator=generator).to(DEVICE)
    return {
        "weight": draw(size + rank).to(DEVICE),
        "bias": draw(1)[0].to(DEVICE),
        "before": draw(VOCAB, rank).to(DEVICE, dtype) if rank else None,
        "hidden": draw(drafts, rows, size).to(DEVICE, dtype),
        "bonus": ids[0],
        "tokens": ids[1:],
    }


def wanted(given: dict[str, torch.Tensor | None]) -> list[list[float]]:
    """The definition, a draft at a time: w . [h ; e] + b, e of the token before."""
    weight, bias, before, hidden, bonus, tokens = given.values()
    assert weight is not None
    assert bias is not None
    assert hidden is not None
    assert bonus is not None
    assert tokens is not None
    drafts, rows, size = hidden.shape
    found = []
    for row in range(rows):
        logits = []
        for draft in range(drafts):
            logit = weight[:size].double() @ hidden[draft, row].double() + bias.double()
            if before is not None:
                token = bonus[row] if draft == 0 else tokens[draft - 1, row]
                logit = logit + weight[size:].double() @ before[token].double()
            logits.append(float(logit))
        found.append(logits)
    return found


@pytest.mark.parametrize("pdl", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("drafts", "rows"), [(1, 1), (7, 1), (1, 3), (3, 4)])
@pytest.mark.parametrize("reads", [True, False])
def test_both_equal_float64(
    drafts: int, rows: int, dtype: torch.dtype, reads: bool, pdl: bool
) -> None:
    for size, rank in SIZES:
        given = cases(drafts, rows, size, rank if reads else 0, dtype)
        expected = torch.tensor(wanted(given), dtype=torch.float64)
        reference = confidence_logits_torch.confidence_logits(*given.values())  # type: ignore[arg-type]
        found = confidence_logits(*given.values(), pdl=pdl)  # type: ignore[arg-type]
        for answer in (reference, found):
            assert answer.shape == (rows, drafts)
            assert answer.dtype == torch.float32
            assert answer.is_contiguous()
            torch.testing.assert_close(answer.cpu().double(), expected, rtol=1e-4, atol=1e-3)


def test_a_token_outside_the_vocabulary_reads_the_first_row() -> None:
    """So may padding rows that no one drafts for."""
    given = cases(2, 2, 8, 4, torch.float32)
    bonus, tokens = given["bonus"], given["tokens"]
    assert bonus is not None
    assert tokens is not None
    bonus[0], tokens[0, 1] = -1, VOCAB
    found = confidence_logits(*given.values())  # type: ignore[arg-type]
    bonus[0] = tokens[0, 1] = 0
    torch.testing.assert_close(found.cpu(), torch.tensor(wanted(given)), rtol=1e-4, atol=1e-5)


def test_no_rows_and_refused_tensors() -> None:
    def call(**other: torch.Tensor) -> torch.Tensor:
        return confidence_logits(**{**cases(2, 3, 8, 4, torch.float32), **other})  # type: ignore[arg-type]

    hidden = torch.zeros(2, 0, 8, device=DEVICE)
    none = torch.zeros(2, 0, dtype=torch.int64, device=DEVICE)
    assert call(hidden=hidden, bonus=none[0], tokens=none).shape == (0, 2)
    with pytest.raises(ValueError, match=r"weight is torch\.float32 \(8,\), not of 12"):
        call(weight=torch.zeros(8, device=DEVICE))
    with pytest.raises(ValueError, match=r"weight is torch\.float64"):
        call(weight=torch.zeros(12, dtype=torch.float64, device=DEVICE))
    with pytest.raises(ValueError, match="hidden is not contiguous"):
        call(hidden=torch.zeros(2, 8, 3, device=DEVICE).transpose(1, 2))
