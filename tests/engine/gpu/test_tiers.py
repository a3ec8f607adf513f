"""Graph tiers: every step has one that holds it, and start-up knows them all."""

import itertools

import numpy as np
import pytest

from outrider.engine.gpu.tiers import Prefill, Tier, Tiers, pass_sizes
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.graph_sizes import CHUNK_ROWS, chunk_rows, chunk_tokens, ladder

from ...reference.verify_budget_ref import run_sizes


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


@pytest.mark.parametrize(
    ("rows", "width", "chunk"), [(1, 1, 1), (3, 4, 9), (48, 1, 512), (64, 4, 512), (70, 3, 1024)]
)
def test_steps_with_prompts_have_tiers_that_were_listed(rows: int, width: int, chunk: int) -> None:
    tiers = Tiers(rows, width, chunk)
    listed, used = set(tiers.mixed()), set()
    prompts = {*range(1, chunk + 1, 7), 1, chunk}
    for count in range(rows + 1):
        for tokens in range(count, count * width + 1):
            for prefill in (Prefill(min(CHUNK_ROWS, size), size) for size in prompts):
                tier = tiers.of(count, tokens, False, False, prefill)
                assert tier is not None
                assert tier.rows >= count
                assert tier.tokens >= tokens + prefill.tokens
                assert tier.nodes >= min(tier.tokens, tokens + prefill.rows)
                assert tier.width == (1 if tokens == count else width)
                assert tier.chunks >= prefill.rows
                assert tier.longest >= prefill.tokens
                used.add(tier)
    assert used == listed
    assert len(listed) <= 18 * (1 + (width > 1))
    assert [tier.tokens for tier in tiers.mixed()] == sorted(t.tokens for t in listed)[::-1]


def test_more_prompts_than_any_graph_has_none() -> None:
    tiers = Tiers(8, 4, 64)
    assert tiers.of(8, 9, True, True, Prefill(CHUNK_ROWS, 64)) is not None
    assert tiers.of(8, 9, True, True, Prefill(CHUNK_ROWS + 1, 64)) is None
    assert tiers.of(8, 9, True, True, Prefill(1, 65)) is None
    assert tiers.of(9, 9, True, True, Prefill(1, 1)) is None
    assert Tiers(8, 4).of(8, 9, False, False, Prefill(1, 1)) is None
    assert Tiers(8, 4).mixed() == ()


def test_the_few_sizes_beside_prompts() -> None:
    assert [chunk_rows(top) for top in (1, 28, 29, 64, 256)] == [
        (1,), (28,), (8, 29), (16, 64), (64, 256)
    ]  # fmt: skip
    for top in range(1, 5000):
        sizes = chunk_tokens(top)
        assert sizes[-1] == top
        assert all(2 * after <= 5 * size for size, after in itertools.pairwise(sizes))
        assert all(4 * after >= 5 * size for size, after in itertools.pairwise(sizes))


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (9, 3), (48, 12), (70, 8), (256, 8)])
def test_planners_know_the_tier_of_every_budget(rows: int, width: int) -> None:
    tiers, sizes = Tiers(rows, width, compact=True), list(ladder(rows * width))
    for count in range(1, rows + 1):
        wanted = np.arange(count, count * width + 1, dtype=np.float64)
        runs = run_sizes(wanted, count, width, sizes)
        for tokens, size in zip(wanted, runs, strict=True):
            tier = tiers.of(count, int(tokens), False, drafts=True)
            assert tier is not None
            assert tier.tokens == size


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
    beside = [Tier(8, 64, 4, False, chunks=16, longest=32)]
    assert pass_sizes(beside, SpecShape(2, 3, 4)) == {64, 24, 72}


def test_fewer_drafts_than_rows_have_room_for_bound_the_tiers() -> None:
    tiers = Tiers(48, 12, 512, drafts=96)
    for rows in (1, 7, 48):
        for tokens in {rows, rows + 1, min(rows * 12, rows + 96)}:
            tier = tiers.of(rows, tokens, False)
            assert tier is not None
            assert tokens <= tier.tokens == tier.nodes <= tier.rows + 96
            mixed = tiers.of(rows, tokens, False, False, Prefill(2, 512))
            assert mixed is not None
            assert tokens + 2 <= mixed.nodes <= 48 + 96 + CHUNK_ROWS
            assert mixed.tokens >= tokens + 512
    largest = tiers.of(48, 48 + 96, False)
    assert largest is not None
    assert largest.tokens == 48 + 96
