"""The budget of each verify step in turn: when there is none, and what overrides it."""

import math

import numpy as np
import pytest

from outrider.engine_core.sps_table import StepTable
from outrider.engine_core.verify_budget import VerifyBudget, VerifyRules
from outrider.engine_core.verify_planner import VerifyPlanner

RULES = VerifyRules(gamma=4)
STEPS = StepTable((1, 4, 6, 8), (100.0, 95.0, 80.0, 60.0), 8)
# Survivals [.9, .72, .36, .09] and [.5, .1, .02, .002].
CONFIDENCE = np.array([[0.9, 0.8, 0.5, 0.25], [0.5, 0.2, 0.2, 0.1]], dtype=np.float32)
ROWS = np.array([2, 0], dtype=np.int32).tobytes()
FULL = np.array([5, 5], dtype=np.int32).tobytes()


def running(costs: StepTable | None, steps: int = 2) -> VerifyPlanner:
    planner = VerifyPlanner(3, RULES, costs)
    planner.start(2)
    planner.start(0)
    for _ in range(steps):
        assert decide(planner) is planner.last is None
        push(planner)
    return planner


def decide(planner: VerifyPlanner) -> VerifyBudget | None:
    return planner.plan(ROWS, FULL, 2)


def push(planner: VerifyPlanner) -> None:
    planner.push(FULL, 2, CONFIDENCE.tobytes())


def test_the_third_step_is_the_first_with_a_budget() -> None:
    planner = running(STEPS)
    found = decide(planner)
    assert found is not None
    assert found is planner.last
    assert (found.drafts, found.candidates) == (3, 8)
    push(planner)
    capped = planner.plan(ROWS, np.array([2, 5], dtype=np.int32).tobytes(), 2)
    assert capped is not None
    assert (capped.drafts, capped.candidates) == (3, 5)


def test_a_step_without_room_takes_the_last_decision_back_and_is_not_counted() -> None:
    planner = running(STEPS)
    assert decide(planner) is not None
    nothing = np.array([1, 1], dtype=np.int32).tobytes()
    assert planner.plan(ROWS, nothing, 2) is planner.last is None
    push(planner)
    planner.push(nothing, 2, b"")
    assert decide(planner) is not None


def test_without_a_table_everything_is_verified() -> None:
    planner = running(None, steps=4)
    planner.force(0.5)
    found = decide(planner)
    assert found is not None
    assert found.drafts == 4
    planner.force(None)
    push(planner)
    assert decide(planner) is None


@pytest.mark.parametrize(("fraction", "drafts"), [(0.0, 0), (1.0, 8), (0.3, 2)])
def test_a_forced_fraction_holds_until_it_is_lifted(fraction: float, drafts: int) -> None:
    planner = running(STEPS)
    planner.force(fraction)
    for _ in range(2):
        found = decide(planner)
        assert found is not None
        assert found.drafts == drafts
        push(planner)
    planner.force(None)
    found = decide(planner)
    assert found is not None
    assert found.drafts == 3
    with pytest.raises(ValueError, match="fraction: must be finite"):
        planner.force(math.nan)
