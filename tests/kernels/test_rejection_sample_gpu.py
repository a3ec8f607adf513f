"""Rejection sampling on the GPU: plain Python's tokens, over several programs a row, cuts too."""

from typing import Any

import pytest
import torch

from outrider.kernels import logit_cut_gpu
from outrider.kernels.draft_draw import draw_drafts as torch_draw
from outrider.kernels.draft_draw_gpu import draw_drafts
from outrider.kernels.rejection_sample import rejection_sample as torch_sample
from outrider.kernels.rejection_sample_gpu import rejection_sample

from .rejection_cases import Case, random_case

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TILE = 2048


def run(case: Case, active: torch.Tensor | None = None) -> list[int]:
    given: list[Any] = [None if part is None else part.to(DEVICE) for part in case.arguments]
    if active is None:
        active = torch.ones(len(case.tokens), dtype=torch.bool)
    tokens: list[int] = rejection_sample(*given, active=active.to(DEVICE)).tolist()
    return tokens


@pytest.mark.parametrize(("vocab", "draft_vocab"), [(5, 5), (130, 50), (300, 300)])
def test_small_vocabularies_agree_with_plain_python(vocab: int, draft_vocab: int) -> None:
    rows = 300 if ON_GPU else 14
    case = random_case(vocab, rows, vocab, draft_vocab, draft_dtype=torch.bfloat16)
    assert run(case) == case.tokens


@pytest.mark.parametrize(
    ("vocab", "draft_vocab", "dtype"),
    [(TILE + 1, TILE + 1, torch.float32), (2 * TILE + 5, 1500, torch.bfloat16)],
)
def test_tiles_of_a_row_agree(vocab: int, draft_vocab: int, dtype: torch.dtype) -> None:
    rows = 100 if ON_GPU else 3
    case = random_case(vocab, rows, vocab, draft_vocab, dtype, torch.float16)
    assert run(case) == case.tokens


def test_one_program_a_row_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_cut_gpu, "_PROGRAMS", 1)
    case = random_case(8, 4, 2 * TILE + 5, TILE + 3)
    assert run(case) == case.tokens


def test_equals_at_the_cut_stay_in_the_order_of_their_ids() -> None:
    """Three tiles of one value: top-k cuts inside the second, and q has mass on both sides."""
    vocab, rows, kept = 2 * TILE + 50, 4, TILE + 700
    logits, own = torch.zeros(rows, vocab), torch.zeros(1, vocab)
    own[0, ::2] = 4.0
    drafts = torch.tensor([0, kept - 2, kept, vocab - 1])
    arguments = (
        logits, torch.ones(rows), torch.full((rows,), kept, dtype=torch.int32), torch.ones(rows),
        torch.zeros(rows), torch.arange(rows), torch.full((rows,), 5), drafts, own,
        torch.zeros(rows, dtype=torch.int64), None,
    )  # fmt: skip
    expected = torch_sample(*arguments)
    assert (expected < kept).all()
    assert run(Case(list(arguments), expected.tolist())) == expected.tolist()


def test_rows_that_are_not_sampled_take_the_argmax_and_bad_rows_nothing() -> None:
    case = random_case(3, 8, 40, 40)
    logits = case.arguments[0]
    logits[2, 5] = torch.nan
    logits[3] = -torch.inf
    active = torch.tensor([False, True, True, True, True, True, False, True])
    tokens = run(case, active)
    assert tokens[2:4] == [-1, -1]
    for row in (0, 6):
        assert tokens[row] == int(logits[row].argmax())
    for row in (1, 4, 5, 7):
        assert tokens[row] == case.tokens[row]


def test_no_rows_and_wrong_layouts() -> None:
    empty = random_case(1, 1, 4, 4)
    none = [None if part is None else part[:0] for part in empty.arguments]
    none[8] = empty.arguments[8]
    assert run(Case(none, [])) == []
    with pytest.raises(ValueError, match="5 columns for 4 tokens"):
        run(Case([*empty.arguments[:8], torch.zeros(2, 5), *empty.arguments[9:]], empty.tokens))
    with pytest.raises(ValueError, match="not contiguous"):
        run(Case([*empty.arguments[:8], torch.zeros(4, 2).T, *empty.arguments[9:]], empty.tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_drafts_are_drawn_as_by_the_reference(dtype: torch.dtype) -> None:
    rows = 200 if ON_GPU else 12
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(rows, 90, generator=generator).mul(2).to(dtype)
    logits[1, 7] = torch.nan
    arguments = (
        torch.randperm(200, generator=generator)[:90].sort().values,
        torch.full((rows,), 0.8), torch.arange(rows) % 4 != 0, torch.arange(rows),
        torch.full((rows,), 31),
    )  # fmt: skip
    expected = torch.zeros(rows, 1, dtype=torch.int64)
    torch_draw(logits, *arguments, tokens=expected)
    tokens = torch.zeros_like(expected).to(DEVICE)
    draw_drafts(logits.to(DEVICE), *(a.to(DEVICE) for a in arguments), tokens=tokens)
    assert torch.equal(tokens.cpu(), expected)
