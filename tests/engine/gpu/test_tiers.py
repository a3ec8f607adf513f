"""Graph tiers: every step has one that holds it, and start-up knows them all."""

import pytest

from outrider.engine.gpu.tiers import Tiers, ladder


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
