"""Acceptance with thresholds: plain Python's tokens, its law, laws at their edges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.kernels import threshold_sample as reference
from outrider.kernels import threshold_sample_cpu
from outrider.kernels.coupled_sample import coupled_sample
from outrider.kernels.threshold_sample import Thresholds

from ..reference import threshold_ref as ref
from .threshold_cases import random_trees

Rule = Callable[..., torch.Tensor]
BOTH: list[Rule] = [reference.threshold_sample, threshold_sample_cpu.threshold_sample]
P = [0.4, 0.3, 0.2, 0.1, 0.0]


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.6), (0.4, 0.5), (0.0, 0.0)])
def test_tokens_are_those_of_plain_python(rule: Rule, thresholds: tuple[float, float]) -> None:
    for vocab in (10, 40, 300):
        case = random_trees(vocab, 30, vocab, Thresholds(*thresholds))
        assert rule(*case.arguments).tolist() == case.tokens
        drafts, parents = (case.arguments[i].tolist() for i in (7, 8))
        kept = sum(
            parent >= 0 and case.tokens[parent] == draft
            for draft, parent in zip(drafts, parents, strict=True)
        )
        assert 10 < kept < sum(parent >= 0 for parent in parents)


def nodes_of(count: int, drafts: list[int]) -> list[Any]:
    """``count`` nodes of law P at temperature 1, each with children that hold ``drafts``."""
    each = 1 + len(drafts)
    nodes = count * each
    root = torch.arange(nodes) // each * each
    parents = torch.where(torch.arange(nodes) == root, -1, root)
    return [
        torch.tensor([P]).log().repeat(nodes, 1),
        torch.ones(nodes),
        torch.zeros(nodes, dtype=torch.int32),
        torch.ones(nodes),
        torch.zeros(nodes),
        torch.arange(nodes),
        torch.full((nodes,), 9),
        torch.tensor([0, *drafts]).repeat(count),
        parents,
    ]


@pytest.mark.parametrize("rule", BOTH)
@pytest.mark.parametrize("drafts", [[0], [2], [4], [3, 1], [1, 4, 0], [1, 1, 2, 1]])
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.25, 1.0), (1.0, 0.5)])
def test_tokens_follow_the_law(
    rule: Rule, drafts: list[int], thresholds: tuple[float, float]
) -> None:
    count = 10_000
    tokens = rule(*nodes_of(count, drafts), Thresholds(*thresholds))[:: 1 + len(drafts)]
    found = torch.bincount(tokens, minlength=len(P)) / count
    law = ref.law(P, drafts, *thresholds)
    assert torch.allclose(found, torch.tensor(law), atol=0.02)
    if thresholds == (1.0, 1.0):
        assert law == pytest.approx(P)
    elif 0 in drafts:
        assert law != pytest.approx(P, abs=0.05)


@pytest.mark.parametrize("rule", BOTH)
def test_a_draft_without_a_chance_is_never_accepted(rule: Rule) -> None:
    """Not even where those before it reach the coin, nor at thresholds of 0."""
    for thresholds in (Thresholds(1.0, 1.0), Thresholds(0.0, 0.0)):
        tokens = rule(*nodes_of(500, [4]), thresholds)[::2]
        assert set(tokens.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", BOTH)
def test_at_thresholds_of_zero_the_first_possible_draft_is_accepted(rule: Rule) -> None:
    tokens = rule(*nodes_of(50, [4, 3, 0]), Thresholds(0.0, 1.0))[::4]
    assert set(tokens.tolist()) == {3}
    tokens = rule(*nodes_of(50, [4, 3, 0]), Thresholds(1.0, 0.0))[::4]
    assert set(tokens.tolist()) == {3}


@pytest.mark.parametrize("rule", BOTH)
def test_nodes_without_children_draw_as_the_coupled_rule(rule: Rule) -> None:
    arguments = nodes_of(40, [])
    tokens = rule(*arguments, Thresholds(0.1, 0.1))
    assert torch.equal(tokens, coupled_sample(*arguments[:7]))


def test_unusable_logits_have_no_token() -> None:
    arguments = nodes_of(2, [1])
    arguments[0][0, 0] = torch.nan
    tokens = BOTH[0](*arguments, Thresholds(0.5, 0.5))
    assert tokens[0] == -1
    assert (tokens[1:] >= 0).all()
