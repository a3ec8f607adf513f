"""Block verification on the GPU: plain Python's tokens, over several programs a row, cuts too."""

from typing import Any

import pytest
import torch

from outrider.kernels import logit_cut_gpu
from outrider.kernels.block_verify_gpu import block_verify

from .block_cases import random_chains
from .rejection_cases import Case

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TILE = 2048


def check(case: Case, active: torch.Tensor | None = None) -> list[int]:
    """The nodes that a walk may reach have plain Python's tokens."""
    given: list[Any] = [None if part is None else part.to(DEVICE) for part in case.arguments]
    if active is None:
        active = torch.ones(len(case.tokens), dtype=torch.bool)
    tokens: list[int] = block_verify(*given, active=active.to(DEVICE)).tolist()
    for node, (token, wanted) in enumerate(zip(tokens, case.tokens, strict=True)):
        if active[node]:
            assert wanted in (-1, token), f"node {node}: {token}, not {wanted}"
    return tokens


@pytest.mark.parametrize(("vocab", "draft_vocab"), [(5, 5), (130, 50), (300, 300)])
def test_small_vocabularies_agree_with_plain_python(vocab: int, draft_vocab: int) -> None:
    chains = 80 if ON_GPU else 6
    tokens = check(random_chains(vocab, chains, vocab, draft_vocab, torch.bfloat16))
    assert all(token >= 0 for token in tokens)


def test_tiles_of_a_row_agree() -> None:
    chains = 40 if ON_GPU else 2
    check(random_chains(7, chains, 2 * TILE + 5, 1500, torch.float16))


def test_one_program_a_row_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_cut_gpu, "_PROGRAMS", 1)
    check(random_chains(8, 2, 2 * TILE + 5, TILE + 3))


def test_chains_that_are_not_sampled_take_the_argmax_and_bad_rows_nothing() -> None:
    case = random_chains(11, 5, 40, 40)
    logits, drafts = case.arguments[0], case.arguments[7]
    ends = [node + 1 for node in range(len(drafts)) if drafts[node] < 0]
    assert ends[-2] > ends[-3]
    active = torch.arange(len(drafts)) >= ends[1]
    logits[ends[-2] :] = torch.nan
    tokens = check(
        Case(case.arguments, [*case.tokens[: ends[-2]], *[-1] * (ends[-1] - ends[-2])]), active
    )
    assert tokens[: ends[1]] == logits[: ends[1]].argmax(dim=1).tolist()
    assert set(tokens[ends[-2] :]) == {-1}


def test_no_rows_and_wrong_layouts() -> None:
    empty = random_chains(1, 2, 4, 4)
    none = [None if part is None else part[:0] for part in empty.arguments]
    none[8] = empty.arguments[8]
    assert check(Case(none, [])) == []
    with pytest.raises(ValueError, match="5 columns for 4 tokens"):
        check(Case([*empty.arguments[:8], torch.zeros(2, 5), *empty.arguments[9:]], empty.tokens))
    with pytest.raises(ValueError, match="not contiguous"):
        check(Case([*empty.arguments[:8], torch.zeros(4, 2).T, *empty.arguments[9:]], empty.tokens))
