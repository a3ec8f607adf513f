"""The likeliest tokens in Triton: order, ties, probabilities over the whole vocabulary, bad rows."""

import math
from collections.abc import Iterator

import pytest
import torch

from outrider.kernels import top_tokens as top_tokens_torch
from outrider.kernels import top_tokens_gpu
from outrider.kernels.top_tokens_gpu import MOST, top_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PDL = [False, pytest.param(True, marks=pytest.mark.gpu)]
CHUNK = 1024  # of few rows
VOCABS = [MOST, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]


@pytest.fixture(autouse=True)
def _poison_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def padded(rows: torch.Tensor) -> torch.Tensor:
    """The same rows as a view into wider ones whose rest is NaN or larger than any logit."""
    wide = rows.new_full((rows.shape[0], rows.shape[1] + 2), math.nan)
    wide[:, -1] = 6e4
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def best(row: list[float], count: int) -> tuple[list[int], list[float]]:
    """Columns and float64 probabilities; -1 and 0 for rows with an unusable logit."""
    if not all(math.isfinite(value) for value in row):
        return [-1] * count, [0.0] * count
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    total = math.fsum(math.exp(value - row[order[0]]) for value in row)
    return order, [math.exp(row[i] - row[order[0]]) / total for i in order]


def check(logits: torch.Tensor, count: int, pdl: bool = False) -> None:
    expected = [best(row, count) for row in logits.tolist()]
    names = torch.randperm(logits.shape[1], generator=torch.Generator().manual_seed(3)) + 100
    moved = logits.to(DEVICE)
    for given in (None, names.to(DEVICE)):
        for tokens, probabilities in (
            top_tokens(padded(moved), count, given, pdl=pdl),
            top_tokens_torch.top_tokens(moved, count, given),
        ):
            wanted = torch.tensor([ids for ids, _ in expected])
            if given is not None:
                wanted = torch.where(wanted < 0, -1, names[wanted])
            assert torch.equal(tokens.cpu(), wanted)
            right = torch.tensor([values for _, values in expected], dtype=torch.float64)
            torch.testing.assert_close(probabilities.cpu().double(), right, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "vocab"), [(1, 1), *zip([1, 2, 4, MOST, 3], VOCABS, strict=True)]
)
def test_random_rows(count: int, vocab: int, dtype: torch.dtype, pdl: bool) -> None:
    # bfloat16 rows of this size tie often
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    check(logits * 3, count, pdl)


def test_equals_come_in_the_order_of_their_columns() -> None:
    logits = torch.full((3, 2 * CHUNK + 5), -1.0)
    logits[0, [5, 6, CHUNK, 2 * CHUNK + 4]] = 2.0
    logits[1, [CHUNK + 3, 2 * CHUNK]] = 2.0
    check(logits, MOST)


def test_one_chunk_may_hold_all_of_the_best() -> None:
    logits = torch.randn(2, 2 * CHUNK, generator=torch.Generator().manual_seed(1))
    logits[:, CHUNK : CHUNK + MOST] += torch.arange(MOST) + 9.0
    check(logits, MOST)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_have_no_tokens(bad: float) -> None:
    logits = torch.randn(4, CHUNK + 7, generator=torch.Generator().manual_seed(1))
    for row, place in enumerate([0, CHUNK - 1, CHUNK + 6]):
        logits[row, place] = bad
    check(logits, 3)


def test_extreme_logits_do_not_overflow() -> None:
    limits = torch.finfo(torch.float32)
    logits = torch.full((2, CHUNK + 1), limits.min / 4)
    logits[1, CHUNK] = limits.max / 4
    check(logits, 2)


@pytest.mark.parametrize("vocab", [4095, 4096, 4097])
def test_large_chunks(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_tokens_gpu, "_PROGRAMS", 1)
    check(torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_vocabulary(rows: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, 151_936, device=DEVICE).to(dtype)
    wanted, shares = top_tokens_torch.top_tokens(logits, 4)
    for pdl in (False, True):
        tokens, probabilities = top_tokens(logits, 4, pdl=pdl)
        assert torch.equal(tokens, wanted)
        torch.testing.assert_close(probabilities, shares, rtol=1e-4, atol=1e-9)


def test_no_rows_and_refused_shapes() -> None:
    tokens, probabilities = top_tokens(torch.zeros(0, 9, device=DEVICE), 2)
    assert tokens.shape == probabilities.shape == (0, 2)
    for shape, count in (((2, 9), 0), ((2, 9), MOST + 1), ((2, 3), 4)):
        with pytest.raises(ValueError, match="contiguous rows"):
            top_tokens(torch.zeros(shape, device=DEVICE), count)
    with pytest.raises(ValueError, match="contiguous rows"):
        top_tokens(torch.zeros(4, 4, device=DEVICE).t(), 1)
    with pytest.raises(ValueError, match=r"names \(3,\) of 9 logits"):
        top_tokens(torch.zeros(1, 9, device=DEVICE), 1, torch.zeros(3, dtype=torch.int64))
