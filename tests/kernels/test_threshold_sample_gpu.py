"""Acceptance with thresholds on the GPU: plain Python's tokens, over several programs a row."""

from typing import Any

import pytest
import torch

from outrider.kernels import logit_cut_gpu
from outrider.kernels.threshold_sample import Thresholds
from outrider.kernels.threshold_sample import threshold_sample as torch_sample
from outrider.kernels.threshold_sample_gpu import threshold_sample

from .threshold_cases import Trees, random_trees

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TILE = 2048


def run(case: Trees, active: torch.Tensor | None = None) -> list[int]:
    given: list[Any] = [
        part.to(DEVICE) if isinstance(part, torch.Tensor) else part for part in case.arguments
    ]
    if active is None:
        active = torch.ones(len(case.arguments[0]), dtype=torch.bool)
    tokens: list[int] = threshold_sample(*given, active=active.to(DEVICE)).tolist()
    return tokens


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.6), (0.0, 0.0)])
def test_small_vocabularies_agree_with_plain_python(thresholds: tuple[float, float]) -> None:
    for vocab in (10, 130) if ON_GPU else (10,):
        case = random_trees(vocab, 60 if ON_GPU else 5, vocab, Thresholds(*thresholds))
        assert run(case) == case.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_a_row_agree(dtype: torch.dtype) -> None:
    rows = 40 if ON_GPU else 2
    case = random_trees(4, rows, 2 * TILE + 5, Thresholds(0.9, 0.7), dtype)
    assert run(case) == case.tokens


def test_one_program_a_row_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_cut_gpu, "_PROGRAMS", 1)
    case = random_trees(6, 2, 2 * TILE + 5, Thresholds(0.9, 0.7))
    assert run(case) == case.tokens


def test_children_at_the_cut_and_beyond_it() -> None:
    """Equal logits over two tiles: top-k keeps the first of them, its cut is in the second."""
    vocab, kept = TILE + 50, TILE + 20
    drafts = torch.tensor([0, kept, kept - 1, 5, 5, vocab - 1])
    arguments = (
        torch.zeros(6, vocab), torch.ones(6), torch.full((6,), kept, dtype=torch.int32),
        torch.ones(6), torch.zeros(6), torch.arange(6), torch.full((6,), 5), drafts,
        torch.tensor([-1, 0, 0, 0, 0, 0]), Thresholds(1.0, 2 / kept),
    )  # fmt: skip
    found = set()
    for seed in range(6 if ON_GPU else 3):
        arguments[5].fill_(seed)
        expected = torch_sample(*arguments).tolist()
        assert run(Trees(list(arguments), expected)) == expected
        found.add(expected[0])
    assert found <= {5, kept - 1}


def test_rows_that_are_not_sampled_take_the_argmax_and_bad_rows_nothing() -> None:
    case = random_trees(3, 3, 40, Thresholds(0.2, 0.5))
    logits = case.arguments[0]
    logits[1, 5] = torch.nan
    active = torch.arange(len(logits)) > 0
    tokens = run(case, active)
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[1] == -1
    assert tokens[2:] == case.tokens[2:]


def test_no_rows() -> None:
    case = random_trees(1, 1, 4, Thresholds(1.0, 0.5))
    none = [part[:0] if isinstance(part, torch.Tensor) else part for part in case.arguments]
    assert run(Trees(none, [])) == []
