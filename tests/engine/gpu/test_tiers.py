"""Graph tiers: every step has one that holds it, and start-up knows them all."""

import pytest

from outrider.engine.gpu.tiers import Tier, Tiers, ladder, pass_sizes
from outrider.engine_core.draft_config import SpecShape


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 12), (48, 12), (64, 8), (70, 3), (130, 1)])
def test_every_step_has_a_tier_that_was_listed(rows: int, width: int) -> None:
    tiers = Tiers(rows, width)
    listed = set(tiers.all())
    used = set()
    for count in range(1, rows + 1):
        for tokens in range(count, count * width + 1):
            tier = tiers.of(count, tokens, False)
            assert tier is not None
            assert tier.rows >= count
            assert tier.tokens >= tokens
            assert tier.width == (1 if tokens == count else width)
            assert tier.tokens <= tier.rows * tier.width
            used.add(tier)
    assert used == listed


def test_more_rows_than_any_graph_has_none() -> None:
    assert Tiers(8, 4).of(9, 9, False) is None


def test_the_ladder_ends_with_the_top() -> None:
    for top in range(1, 400):
        sizes = ladder(top)
        assert sizes[-1] == top
        assert list(sizes) == sorted(set(sizes))


def test_a_draft_model_runs_a_token_a_row_what_was_accepted_and_levels_of_trees() -> None:
    tiers = [Tier(8, 32, 4, False), Tier(2, 2, 1, False)]
    assert pass_sizes(tiers, SpecShape(3, 1, 4)) == {2, 8, 32}
    assert pass_sizes(tiers, SpecShape(4, 3, 4)) == {2, 8, 32, 24, 48, 72}
    assert pass_sizes([], SpecShape(3, 1, 4)) == set()
