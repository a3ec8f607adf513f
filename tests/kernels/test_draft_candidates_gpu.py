"""A draft's candidates in Triton: order, ties, chances over the whole vocabulary, bad rows."""

import math
from collections.abc import Iterator

import pytest
import torch

from outrider.engine_core.spec_shape import MAX_CUDA_TOPK
from outrider.kernels import draft_candidates as draft_candidates_torch
from outrider.kernels import draft_candidates_gpu
from outrider.kernels.draft_candidates_gpu import MOST, top_candidates

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
    """Columns and float64 probabilities; no chance for rows with an unusable logit."""
    if not all(math.isfinite(value) for value in row):
        return [-1] * count, [0.0] * count
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    total = math.fsum(math.exp(value - row[order[0]]) for value in row)
    return order, [math.exp(row[i] - row[order[0]]) / total for i in order]


def check(logits: torch.Tensor, count: int, pdl: bool = False) -> None:
    rows, vocab = logits.shape
    expected = [best(row, count) for row in logits.tolist()]
    right = torch.tensor([values for _, values in expected], dtype=torch.float64)
    names = torch.randperm(vocab, generator=torch.Generator().manual_seed(3)) + 100
    moved, arrived = logits.to(DEVICE), torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)
    for given in (None, names):
        wanted = torch.tensor([ids for ids, _ in expected])
        known, ids = wanted >= 0, None if given is None else given.to(DEVICE)
        if given is not None:
            wanted = torch.where(known, given[wanted], -1)
        for with_probs in (True, False) if count == 1 else (True,):
            for reference in (True, False):
                tokens = torch.full((rows, count), -5, device=DEVICE)
                probs = torch.full((rows, count), math.nan, device=DEVICE) if with_probs else None
                if reference:
                    draft_candidates_torch.top_candidates(moved, ids, tokens=tokens, probs=probs)
                else:
                    top_candidates(
                        padded(moved), ids, tokens=tokens, probs=probs, arrived=arrived, pdl=pdl
                    )
                assert torch.equal(torch.where(known, tokens.cpu(), -1), wanted)
                assert int(tokens.min()) >= (0 if given is None else 100)
                assert int(tokens.max()) < vocab + (0 if given is None else 100)
                if probs is not None:
                    chances = probs.cpu().double()
                    torch.testing.assert_close(chances, right, rtol=1e-5, atol=1e-9)
    assert not arrived.any()


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
    logits[1] = bad
    check(logits, 3)


def test_extreme_logits_do_not_overflow() -> None:
    limits = torch.finfo(torch.float32)
    logits = torch.full((2, CHUNK + 1), limits.min / 4)
    logits[1, CHUNK] = limits.max / 4
    check(logits, 2)


@pytest.mark.parametrize("vocab", [4095, 4096, 4097])
def test_large_chunks(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_candidates_gpu, "_PROGRAMS", 1)
    check(torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_vocabulary(rows: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, 151_936, device=DEVICE).to(dtype)
    wanted, tokens = (torch.empty(rows, 4, dtype=torch.int64, device=DEVICE) for _ in range(2))
    shares, probs = torch.empty(2, rows, 4, device=DEVICE).unbind()
    draft_candidates_torch.top_candidates(logits, None, tokens=wanted, probs=shares)
    arrived = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    for pdl in (False, True) * 20:
        top_candidates(logits, None, tokens=tokens, probs=probs, arrived=arrived, pdl=pdl)
        assert torch.equal(tokens, wanted)
        torch.testing.assert_close(probs, shares, rtol=1e-4, atol=1e-9)
        tokens.zero_()
    top_candidates(logits, None, tokens=tokens[:, :1], probs=None, arrived=arrived, pdl=True)
    assert torch.equal(tokens[:, 0], wanted[:, 0])


def test_no_rows_and_refused_shapes() -> None:
    assert MOST == MAX_CUDA_TOPK  # wider trees are refused before anything is loaded

    def call(logits: torch.Tensor, count: int, ids: torch.Tensor | None = None) -> torch.Tensor:
        tokens = torch.full((len(logits), count), -5, device=DEVICE)
        top_candidates(logits, ids, tokens=tokens, probs=None)
        return tokens

    assert call(torch.zeros(0, 9, device=DEVICE), 2).shape == (0, 2)
    for shape, count in (((2, 9), 0), ((2, 9), MOST + 1), ((2, 3), 4)):
        with pytest.raises(ValueError, match="contiguous rows"):
            call(torch.zeros(shape, device=DEVICE), count)
    with pytest.raises(ValueError, match="contiguous rows"):
        call(torch.zeros(4, 4, device=DEVICE).t(), 1)
    with pytest.raises(ValueError, match=r"token_ids \(3,\) of 9 logits"):
        call(torch.zeros(1, 9, device=DEVICE), 1, torch.zeros(3, dtype=torch.int64))
