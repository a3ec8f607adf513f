"""Confidence that comes back late: worked orders of events, and any order against a plain model."""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outrider.engine_core.confidence_relay import ConfidenceRelay

from ..stateful import run_until_reached

GAMMA = 3
SLOTS = 4


def ids(*slots: int) -> np.ndarray:
    return np.array(slots, dtype=np.int32)


def chances(*values: float) -> np.ndarray:
    """Each value is that of all positions of one row."""
    return np.repeat(np.array(values, dtype=np.float32)[:, None], GAMMA, axis=1)


def kept(survivals: np.ndarray | None) -> list[float]:
    assert survivals is not None
    return [float(first) for first in survivals[:, 0]]


def test_under_overlap_a_step_goes_by_the_one_before_the_last() -> None:
    relay = ConfidenceRelay(SLOTS, GAMMA)
    relay.start(1)
    relay.start(2)
    assert relay.plan(ids(1, 2)) is None
    assert relay.plan(ids(1, 2)) is None  # while step 0 runs
    relay.push(chances(0.5, 0.25))
    found = relay.plan(ids(2, 1))
    assert found is not None
    np.testing.assert_array_equal(found, [[0.25, 0.0625, 0.015625], [0.5, 0.25, 0.125]])
    relay.push(chances(0.75, 1.0))
    assert kept(relay.plan(ids(1, 2))) == [0.75, 1.0]


def test_without_overlap_the_same_steps_are_gone_by() -> None:
    relay = ConfidenceRelay(SLOTS, GAMMA)
    relay.start(0)
    found = []
    for value in (0.5, 0.25, 0.75, 1.0):
        found.append(relay.plan(ids(0)))
        relay.push(chances(value))
    assert found[:2] == [None, None]
    assert [kept(survivals) for survivals in found[2:]] == [[0.5], [0.25]]


def test_a_new_request_in_a_slot_is_taken_for_sure() -> None:
    relay = ConfidenceRelay(SLOTS, GAMMA)
    relay.start(1)
    relay.plan(ids(1, 3))  # nobody ever entered 3
    relay.plan(ids(1, 3))
    relay.start(1)  # while both steps run: what they bring is not the new request's
    relay.push(chances(0.5, 0.5))
    assert kept(relay.plan(ids(1, 3))) == [1.0, 1.0]
    relay.push(chances(0.5, 0.5))
    assert kept(relay.plan(ids(1, 2))) == [1.0, 1.0]
    relay.push(chances(0.5, 0.5))
    assert kept(relay.plan(ids(1, 2))) == [0.5, 1.0]


def test_a_row_that_a_step_lacked_is_not_older() -> None:
    relay = ConfidenceRelay(SLOTS, GAMMA, lag=1)
    relay.start(0)
    relay.start(1)
    for rows in (ids(0, 1), ids(0)):
        relay.plan(rows)
        relay.push(chances(*[0.5] * len(rows)))
    assert kept(relay.plan(ids(0, 1))) == [0.5, 1.0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="lag: must be 1 or more, got 0"):
        ConfidenceRelay(SLOTS, GAMMA, lag=0)
    relay = ConfidenceRelay(SLOTS, GAMMA)
    with pytest.raises(RuntimeError, match="not planned"):
        relay.push(chances(0.5))
    relay.plan(ids(0))
    relay.plan(ids(0))
    with pytest.raises(RuntimeError, match="step 2 goes by step 0, but 0 are in"):
        relay.plan(ids(0))


class Machine(RuleBasedStateMachine):
    """Any order of events beside a list of all that ever happened."""

    reached: ClassVar[Counter[str]] = Counter()

    @initialize(lag=st.integers(1, 3))
    def begin(self, lag: int) -> None:
        self.lag = lag
        self.relay = ConfidenceRelay(SLOTS, GAMMA, lag)
        self.owners = [0] * SLOTS  # the request in each slot, numbered over all
        self.requests = 0
        self.steps: list[dict[int, int]] = []  # of each planned: owner by slot
        self.values: list[dict[int, float]] = []  # of each pushed: value by slot

    @rule(slot=st.integers(0, SLOTS - 1))
    def enter(self, slot: int) -> None:
        self.requests += 1
        self.owners[slot] = self.requests
        self.relay.start(slot)

    @precondition(lambda self: len(self.steps) - self.lag < len(self.values))
    @rule(slots=st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS))
    def plan(self, slots: list[int]) -> None:
        source = len(self.steps) - self.lag
        found = self.relay.plan(ids(*slots))
        self.steps.append({slot: self.owners[slot] for slot in slots})
        if source < 0:
            self.reached["too early"] += 1
            assert found is None
            return
        wanted = []
        for slot in slots:
            owner = self.steps[source].get(slot)
            if owner is None:
                self.reached["not in that step"] += 1
            elif owner != self.owners[slot]:
                self.reached["another request's"] += 1
            elif not owner:
                self.reached["nobody's"] += 1
            else:
                self.reached["known"] += 1
                wanted.append(self.values[source][slot])
                continue
            wanted.append(1.0)
        assert kept(found) == wanted

    @precondition(lambda self: len(self.steps) > len(self.values))
    @rule(seed=st.integers(0, 2**16))
    def push(self, seed: int) -> None:
        rows = list(self.steps[len(self.values)])
        values = np.random.default_rng(seed).random(len(rows), dtype=np.float32)
        self.relay.push(chances(*values))
        self.values.append(dict(zip(rows, values.tolist(), strict=True)))


def test_any_order_of_events() -> None:
    wanted = ("too early", "not in that step", "another request's", "nobody's", "known")
    run_until_reached(Machine, Machine.reached, wanted, examples=60, steps=30)
