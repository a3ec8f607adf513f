"""An EAGLE draft's input in one launch against the torch reference and float64."""

import math
from collections.abc import Iterator

import pytest
import torch

from outrider.kernels import draft_input as draft_input_torch
from outrider.kernels.draft_input_gpu import draft_input

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PDL = [False, pytest.param(True, marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
VOCAB, EPS = 7, 1e-6
IDS = [3, 6, 0, 7, -1, 2**40]
KNOWN = [3, 6, 0, 0, 0, 0]


@pytest.fixture(autouse=True)
def _poison_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def padded(rows: torch.Tensor) -> torch.Tensor:
    """The same rows as a view into wider ones whose rest is NaN."""
    wide = rows.new_full((rows.shape[0], rows.shape[1] + 8), math.nan)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def exact(rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    wide = rows.double()
    if weight is None:
        return wide
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", ["", "e", "h", "eh"])
@pytest.mark.parametrize(("left", "right"), [(1, 1), (15, 16), (16, 17), (33, 8)])
def test_halves(left: int, right: int, norms: str, dtype: torch.dtype, pdl: bool) -> None:
    table, hidden = randn(VOCAB, left, dtype=dtype, seed=1), randn(6, right, dtype=dtype, seed=2)
    embed_norm = randn(left, dtype=dtype, seed=3) if "e" in norms else None
    hidden_norm = randn(right, dtype=dtype, seed=4) if "h" in norms else None
    ids = torch.tensor(IDS, device=DEVICE)
    expected = torch.cat((exact(table[KNOWN], embed_norm), exact(hidden, hidden_norm)), dim=1)
    actual = draft_input(ids, padded(table), padded(hidden), embed_norm, hidden_norm, EPS, pdl=pdl)
    same = draft_input_torch.draft_input(ids, table, hidden, embed_norm, hidden_norm, EPS)
    for got in (actual, same):
        assert got.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    if not norms:
        assert torch.equal(actual, same)


def test_no_rows_and_refused_shapes() -> None:
    table, hidden = torch.zeros(4, 8, device=DEVICE), torch.zeros(2, 8, device=DEVICE)
    ids = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert draft_input(ids[:0], table, hidden[:0], None, None, EPS).shape == (0, 16)
    with pytest.raises(ValueError, match=r"\(1,\) ids .* for 2 rows"):
        draft_input(ids[:1], table, hidden, None, None, EPS)
    with pytest.raises(ValueError, match="contiguous rows of one dtype"):
        draft_input(ids, table.half(), hidden, None, None, EPS)
    with pytest.raises(ValueError, match="contiguous rows of one dtype"):
        draft_input(ids, table.t(), hidden, None, None, EPS)
    with pytest.raises(ValueError, match="for rows of 8"):
        draft_input(ids, table, hidden, None, torch.ones(4, device=DEVICE), EPS)
