"""The greedy choice in Triton: ties to the lowest id, bad rows seen, any chunking."""

import math
from collections.abc import Iterator

import pytest
import torch

from outrider.kernels import greedy_argmax_gpu
from outrider.kernels.greedy_argmax_gpu import greedy_argmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PDL = [False, pytest.param(True, marks=pytest.mark.gpu)]
CHUNK = 1024  # of few rows
VOCABS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3]


def padded(rows: torch.Tensor) -> torch.Tensor:
    """The same rows as a view into wider ones whose rest is NaN or larger than any logit."""
    wide = rows.new_full((rows.shape[0], rows.shape[1] + 2), math.nan)
    wide[:, -1] = 6e4
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def first_largest(row: list[float]) -> int:
    return row.index(max(row)) if all(math.isfinite(value) for value in row) else -1


@pytest.fixture(autouse=True)
def _poison_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_random_rows(vocab: int, dtype: torch.dtype, pdl: bool) -> None:
    # bfloat16 and float16 rows of this size tie often
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    expected = [first_largest(row) for row in logits.tolist()]
    assert greedy_argmax(padded(logits.to(DEVICE)), pdl=pdl).tolist() == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_have_no_choice(bad: float) -> None:
    vocab = 2 * CHUNK + 7
    places = [0, CHUNK - 1, CHUNK, 2 * CHUNK, vocab - 1]
    logits = torch.randn(len(places) + 1, vocab, generator=torch.Generator().manual_seed(1))
    for row, place in enumerate(places):
        logits[row, place] = bad
    expected = [-1] * len(places) + [int(logits[-1].argmax())]
    assert greedy_argmax(logits.to(DEVICE)).tolist() == expected
    assert greedy_argmax(torch.full((1, vocab), bad, device=DEVICE)).tolist() == [-1]


def test_the_lowest_of_equals_wins_across_chunks_and_signed_zeros() -> None:
    vocab = 3 * CHUNK
    logits = torch.full((4, vocab), -1.0)
    logits[0, [5, 6, CHUNK, 2 * CHUNK]] = 2.0
    logits[1, [CHUNK + 3, 2 * CHUNK]] = 2.0
    logits[2, [9, 2 * CHUNK]] = torch.tensor([-0.0, 0.0])
    assert greedy_argmax(logits.to(DEVICE)).tolist() == [5, CHUNK + 3, 9, 0]


def test_extreme_values_are_usable() -> None:
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((2, CHUNK + 1), lowest)
    logits[1, CHUNK] = torch.finfo(torch.float32).max
    assert greedy_argmax(logits.to(DEVICE)).tolist() == [0, CHUNK]


@pytest.mark.parametrize("vocab", [4095, 4096, 4097, 16_385])
def test_large_chunks_of_several_blocks(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy_argmax_gpu, "_PROGRAMS", 1)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1, vocab - 1] = 9.0
    logits[2, vocab - 1] = math.nan
    expected = [int(logits[0].argmax()), vocab - 1, -1]
    assert greedy_argmax(padded(logits.to(DEVICE))).tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 256, 2048])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_vocabulary(rows: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, 151_936, device=DEVICE).to(dtype)
    peak = logits.amax(1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=DEVICE)
    expected = torch.where(logits == peak, ids, logits.shape[1]).amin(1)
    assert torch.equal(greedy_argmax(logits), expected)
    assert torch.equal(greedy_argmax(logits, pdl=True), expected)


def test_no_rows_and_refused_shapes() -> None:
    assert greedy_argmax(torch.zeros(0, 9, device=DEVICE)).shape == (0,)
    with pytest.raises(ValueError, match="not contiguous rows of a vocabulary"):
        greedy_argmax(torch.zeros(2, 0, device=DEVICE))
    with pytest.raises(ValueError, match="not contiguous rows of a vocabulary"):
        greedy_argmax(torch.zeros(4, 4, device=DEVICE).t())
