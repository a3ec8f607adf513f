"""The budget of a verify step: worked numbers, a brute-force search, what limits it."""

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine_core.sps_table import AdditiveTable, SpsTable, StepTable
from outrider.engine_core.verify_budget import (
    VerifyBudget,
    VerifyRules,
    filled_budget,
    forced_budget,
    needed_tokens,
)
from outrider.engine_core.verify_planner import VerifyPlanner

from ..reference.verify_budget_ref import survival
from ..reference.verify_lens_ref import best_budget

# Survivals [.9, .72, .36, .09] and [.5, .1, .02, .002].
WORKED = np.array([[0.9, 0.8, 0.5, 0.25], [0.5, 0.2, 0.2, 0.1]], dtype=np.float32)
STEPS = StepTable((1, 4, 6, 8), (100.0, 95.0, 80.0, 60.0), 8)
FLAT = StepTable((1,), (50.0,), 1)


def choose_budget(
    chances: np.ndarray,
    costs: SpsTable,
    rules: VerifyRules,
    *,
    caps: tuple[int, ...] | None = None,
    batch_tokens: int | None = None,
    fraction: float | None = None,
) -> VerifyBudget:
    """Of a step whose confidence is known, float32[N, gamma]."""
    rows = len(chances)
    planner = VerifyPlanner(rows, rules, costs, lag=1)
    slots = np.arange(rows, dtype=np.int32).tobytes()
    full = np.full(rows, rules.gamma + 1, dtype=np.int32).tobytes()
    for slot in range(rows):
        planner.start(slot)
    assert planner.plan(slots, full, rows) is None
    planner.push(full, rows, chances.tobytes())
    planner.force(fraction)
    q_caps = full if caps is None else (np.array(caps, dtype=np.int32) + 1).tobytes()
    found = planner.plan(slots, q_caps, rows if batch_tokens is None else batch_tokens)
    assert found is not None
    return found


def test_the_worked_numbers() -> None:
    wanted = [200, 290, 343.9, 391.4, 358.4, 366.4, 280.2, 281.4, 281.52]
    for drafts, rate in enumerate(wanted):  # several peaks
        forced = choose_budget(WORKED, STEPS, VerifyRules(gamma=4), fraction=drafts / 8)
        assert forced.drafts == drafts
        assert forced.rate == pytest.approx(rate, rel=1e-6)
    found = choose_budget(WORKED, STEPS, VerifyRules(gamma=4))
    assert (found.drafts, found.candidates) == (3, 8)
    assert found.seconds == pytest.approx(1 / 95)
    assert found.rate == pytest.approx(391.4)


def test_where_size_costs_nothing_everything_is_verified() -> None:
    assert choose_budget(WORKED, FLAT, VerifyRules(gamma=4)).drafts == 8


def test_drafts_without_hope_are_no_candidates() -> None:
    confidence = np.array([[0.0, 1.0], [1.0, 1e-6], [1.0, 9e-7], [np.nan, 1.0]], np.float32)
    found = choose_budget(confidence, FLAT, VerifyRules(gamma=2))
    assert (found.drafts, found.candidates) == (3, 3)
    assert choose_budget(confidence, FLAT, VerifyRules(gamma=2, eps=0.0)).candidates == 8


@pytest.mark.parametrize(("length", "drafts"), [(0, 8), (1, 2), (2, 4), (3, 6), (4, 8), (5, 8)])
def test_the_longest_length_limits_the_depth(length: int, drafts: int) -> None:
    rules = VerifyRules(gamma=4, max_verify_len=length)
    assert choose_budget(WORKED, FLAT, rules).drafts == drafts


def test_rows_may_have_caps_of_their_own() -> None:
    found = choose_budget(WORKED, FLAT, VerifyRules(gamma=4), caps=(1, 0))
    assert (found.drafts, found.candidates) == (1, 1)
    assert found.rate == pytest.approx(2.9 * 50)


def test_other_tokens_of_the_step_cost_too() -> None:
    rules = VerifyRules(gamma=4)
    assert choose_budget(WORKED, STEPS, rules, batch_tokens=4).seconds == 1 / 80
    assert choose_budget(WORKED, STEPS, rules, batch_tokens=8).drafts == 8


@pytest.mark.parametrize(
    ("fraction", "drafts"), [(0.0, 0), (0.5, 4), (0.49, 3), (1.0, 8), (2.0, 8), (-1.0, 0)]
)
def test_a_forced_budget_asks_nobody(fraction: float, drafts: int) -> None:
    found = choose_budget(WORKED, STEPS, VerifyRules(gamma=4), fraction=fraction)
    assert found.drafts == drafts == min(8, forced_budget(fraction, 2, 4))
    emitted = 2 + float(np.sort(survival(WORKED).ravel())[::-1][:drafts].sum())
    assert found.seconds == pytest.approx(STEPS.seconds(2, 2 + drafts))
    assert found.rate == pytest.approx(emitted / found.seconds)


def test_the_worked_room() -> None:
    rules = VerifyRules(gamma=7)
    assert needed_tokens(10, 3, rules) == 13
    assert filled_budget(16, 3, 7) == 13
    assert needed_tokens(99, 3, rules) == 24
    assert needed_tokens(10, 3, VerifyRules(gamma=7, min_verify_len=3)) == 19
    assert needed_tokens(10, 3, VerifyRules(gamma=7, min_verify_len=0)) == 13
    assert (filled_budget(99, 3, 7), filled_budget(2, 3, 7)) == (21, 0)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"gamma": 0}, "gamma: must be 1 or more"),
        ({"gamma": 4, "max_verify_len": 6}, "max_verify_len: must be 0 to 5"),
        ({"gamma": 4, "min_verify_len": -1}, "min_verify_len: must be 0 to 5"),
        ({"gamma": 4, "min_verify_len": 3, "max_verify_len": 2}, "min_verify_len: must be 0 to 2"),
        ({"gamma": 4, "eps": -1.0}, "eps: must be 0 or more"),
        ({"gamma": 4, "eps": math.nan}, "eps: must be 0 or more"),
    ],
)
def test_rules_that_cannot_be(rules: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VerifyRules(**rules)


costs = st.one_of(
    st.lists(st.floats(1.0, 1e3), min_size=1, max_size=5).map(
        lambda rates: StepTable(
            tuple(1 + 4 * i for i in range(len(rates))), tuple(rates), 4 * len(rates)
        )
    ),
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=5).map(
        lambda times: AdditiveTable(
            0.1, (1, 3), (0.0, 0.2), tuple(range(1, 8 * len(times), 8)), tuple(times)
        )
    ),
)


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1e-4, 0.1, 0.5, 0.9, 1.0]), min_size=3, max_size=3),
        min_size=1,
        max_size=6,
    ),
    costs,
    st.integers(0, 4),
)
def test_every_budget_was_looked_at(
    confidence: list[list[float]], table: SpsTable, longest: int
) -> None:
    rules = VerifyRules(gamma=3, min_verify_len=0, max_verify_len=longest)
    chances = np.array(confidence, dtype=np.float32)
    survivals = survival(chances)
    seconds = [table.seconds(len(survivals), len(survivals) + b) for b in range(20)]
    found = choose_budget(chances, table, rules)
    drafts, rate = best_budget(survivals.tolist(), seconds, rules.limit, rules.eps)
    assert found.rate == pytest.approx(rate)
    # Rates that differ by rounding alone may trade places.
    assert found.drafts == drafts or math.isclose(found.rate, rate, rel_tol=1e-12)


def test_survival_never_rises_and_is_rounded_after_each_product() -> None:
    confidence = np.random.default_rng(5).random((64, 15), dtype=np.float32)
    found = survival(confidence)
    assert found.dtype == np.float32
    assert (np.diff(found, axis=1) <= 0).all()
    running = np.ones(64, dtype=np.float32)
    for k in range(15):
        running = running * confidence[:, k]
        np.testing.assert_array_equal(found[:, k], running)


@pytest.mark.serial
def test_a_full_batch_is_planned_in_no_time() -> None:
    chances = (np.random.default_rng(2).random((256, 7), dtype=np.float32) ** 0.2).tobytes()
    slots = np.arange(256, dtype=np.int32).tobytes()
    q_caps = np.full(256, 8, dtype=np.int32).tobytes()
    sizes = tuple(range(64, 2049, 64))
    tables = (
        StepTable(sizes, tuple(1e3 / (1 + m / 500) for m in sizes), 2048),
        AdditiveTable(1e-2, (1, 256), (0.0, 1e-3), sizes, tuple(m * 1e-5 for m in sizes)),
    )
    for table in tables:
        planner = VerifyPlanner(256, VerifyRules(gamma=7), table, lag=1)
        for slot in range(256):
            planner.start(slot)
        took = []
        for _ in range(50):
            began = time.perf_counter()
            planner.plan(slots, q_caps, 256)
            planner.push(q_caps, 256, chances)
            took.append(time.perf_counter() - began)
        assert planner.last is not None
        assert planner.last.candidates == 1792
        assert sorted(took)[len(took) // 2] < 200e-6
