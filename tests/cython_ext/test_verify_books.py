"""Confidence that comes back late and what it leads to: worked orders of events, and any order
and any table against plain numpy."""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outrider.cython_ext.verify_books import StepCosts, VerifyBooks

from ..reference.verify_budget_ref import (
    Rates,
    Relay,
    additive_rates,
    choose_budget,
    run_sizes,
    step_rates,
)
from ..stateful import run_until_reached

GAMMA = 3
SLOTS = 4
FLAT = StepCosts(np.ones(1), np.ones(1))


def int32(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def made(lag: int = 2) -> VerifyBooks:
    return VerifyBooks(SLOTS, GAMMA, lag, GAMMA, 1e-6)


def plan(books: VerifyBooks, *slots: int) -> tuple[int, int, float, float] | None:
    return books.plan(int32(*slots), int32(*[GAMMA + 1] * len(slots)), len(slots), FLAT)


def take(books: VerifyBooks, *values: float) -> None:
    """Each value is that of all positions of one row."""
    chances = np.repeat(np.array(values, dtype=np.float32), GAMMA)
    books.take(int32(*[GAMMA + 1] * len(values)), len(values), chances.tobytes())


def kept(books: VerifyBooks, *slots: int) -> list[float]:
    """By which the slots are planned next: the first survival, 1 where nothing is known."""
    return [(books.survivals_of(slot) or [1.0])[0] for slot in slots]


def test_under_overlap_a_step_goes_by_the_one_before_the_last() -> None:
    books = made()
    books.start(1)
    books.start(2)
    assert plan(books, 1, 2) is None
    assert plan(books, 1, 2) is None  # while step 0 runs
    take(books, 0.5, 0.25)
    assert books.survivals_of(2) == [0.25, 0.0625, 0.015625]
    assert books.survivals_of(1) == [0.5, 0.25, 0.125]
    found = plan(books, 2, 1)
    assert found is not None
    assert found[:2] == (6, 6)
    assert found[3] == pytest.approx(2 + 0.328125 + 0.875)
    take(books, 0.75, 1.0)
    assert kept(books, 1, 2) == [0.75, 1.0]


def test_without_overlap_the_same_steps_are_gone_by() -> None:
    books = made()
    books.start(0)
    found = []
    for value in (0.5, 0.25, 0.75, 1.0):
        found += kept(books, 0)
        plan(books, 0)
        take(books, value)
    assert found == [1.0, 1.0, 0.5, 0.25]


def test_a_new_request_in_a_slot_is_taken_for_sure() -> None:
    books = made()
    books.start(1)
    plan(books, 1, 3)  # nobody ever entered 3
    plan(books, 1, 3)
    books.start(1)  # while both steps run: what they bring is not the new request's
    take(books, 0.5, 0.5)
    assert kept(books, 1, 3) == [1.0, 1.0]
    plan(books, 1, 3)
    take(books, 0.5, 0.5)
    assert kept(books, 1, 2) == [1.0, 1.0]
    plan(books, 1, 2)
    take(books, 0.5, 0.5)
    assert kept(books, 1, 2) == [0.5, 1.0]


def test_a_row_that_a_step_lacked_is_not_older() -> None:
    books = made(lag=1)
    books.start(0)
    books.start(1)
    for rows in ((0, 1), (0,)):
        plan(books, *rows)
        take(books, *[0.5] * len(rows))
    assert kept(books, 0, 1) == [0.5, 1.0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="lag: must be 1 or more, got 0"):
        made(lag=0)
    with pytest.raises(ValueError, match="must be 1 or more"):
        VerifyBooks(0, GAMMA, 2, GAMMA, 0.0)
    with pytest.raises(ValueError, match="limit 0 to gamma"):
        VerifyBooks(SLOTS, GAMMA, 2, GAMMA + 1, 0.0)
    with pytest.raises(ValueError, match="eps: must be 0 or more"):
        VerifyBooks(SLOTS, GAMMA, 2, GAMMA, float("nan"))
    for sizes, at in (((0, 4), 0), ((2, 4, 4), 2), ((8, 4), 1)):
        with pytest.raises(ValueError, match=f"sizes: must rise from 1, got . at place {at}"):
            VerifyBooks(SLOTS, GAMMA, 2, GAMMA, 0.0, int32(*sizes))
    books = made()
    with pytest.raises(RuntimeError, match="not planned"):
        take(books, 0.5)
    plan(books, 0)
    with pytest.raises(ValueError, match="of 2 rows came for a step of 1"):
        take(books, 0.5, 0.5)
    with pytest.raises(ValueError, match="12 bytes of confidence came for 2 rows of 3 drafts"):
        books.take(int32(4, 4), 2, bytes(12))
    with pytest.raises(ValueError, match="q_caps: 4 bytes for 2 rows"):
        books.take(int32(4), 2, b"")
    with pytest.raises(ValueError, match="q_caps: 4 bytes for 2 rows"):
        books.plan(int32(0, 1), int32(4), 2)
    for wrong in (-1, SLOTS):
        with pytest.raises(ValueError, match=f"slot: {wrong} is not one of 4"):
            plan(books, wrong)
        with pytest.raises(ValueError, match=f"slot: {wrong} is not one of 4"):
            books.start(wrong)
        with pytest.raises(ValueError, match=f"slot: {wrong} is not one of 4"):
            books.survivals_of(wrong)
    plan(books, 0)
    with pytest.raises(RuntimeError, match="step 2 goes by step 0, but 0 are in"):
        plan(books, 0)


def test_costs_that_do_not_fit() -> None:
    one, two = np.ones(1), np.ones(2)
    with pytest.raises(ValueError, match="values: 2 for 1 probes"):
        StepCosts(one, two)
    with pytest.raises(ValueError, match="request_seconds: 1 for 2 probes"):
        StepCosts(one, one, two, one, 1.0)
    with pytest.raises(ValueError, match="come together"):
        StepCosts(one, one, one)


probes = st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True).map(sorted)


graphs = st.sampled_from([9, 40, 330]).flatmap(
    lambda top: st.lists(st.integers(1, top), max_size=40, unique=True).map(sorted)
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[StepCosts, Rates]:
    """One table, compiled and plain; as a rule larger steps are slower."""
    tokens = [float(at) for at in draw(probes)]
    amounts = st.floats(0.1, 1.0)
    values = [draw(amounts) for _ in tokens]
    by_steps = draw(st.booleans())
    if draw(st.sampled_from([True, True, False])):
        values.sort(reverse=by_steps)
    if by_steps:
        return StepCosts(np.array(tokens), np.array(values)), step_rates(tokens, values)
    requests = [float(at) for at in draw(probes)]
    seconds = [draw(amounts) for _ in requests]
    costs = StepCosts(
        np.array(tokens), np.array(values), np.array(requests), np.array(seconds), 0.05
    )
    return costs, additive_rates(0.05, requests, seconds, tokens, values)


@given(tables(), st.integers(0, 10), st.integers(0, 60))
def test_costs_are_those_of_numpy(
    table: tuple[StepCosts, Rates], requests: int, tokens: int
) -> None:
    costs, rates = table
    wanted = 1.0 / rates(np.ones(1), requests, np.array([float(tokens)]))[0]
    assert costs.seconds(requests, tokens) == pytest.approx(wanted, rel=1e-14)


class Machine(RuleBasedStateMachine):
    """Any order of events, any table, beside plain numpy."""

    reached: ClassVar[Counter[str]] = Counter()

    @initialize(
        lag=st.integers(1, 3),
        gamma=st.sampled_from([3, 7]),
        slots=st.sampled_from([4, 40]),
        shorter=st.integers(0, 2),
        eps=st.sampled_from([0.0, 1e-6, 0.1]),
        table=tables(),
        graphs=graphs,
    )
    def begin(
        self,
        lag: int,
        gamma: int,
        slots: int,
        shorter: int,
        eps: float,
        table: tuple[StepCosts, Rates],
        graphs: list[int],
    ) -> None:
        self.graphs = graphs
        self.gamma, self.slots, self.eps, self.limit = gamma, slots, eps, gamma - shorter
        self.costs, self.rates = table
        self.books = VerifyBooks(slots, gamma, lag, self.limit, eps, int32(*graphs))
        self.relay = Relay(slots, gamma, lag)
        self.flying: list[np.ndarray] = []  # drafts by row of the steps in flight
        for slot in range(1, slots):  # nobody has entered the first one yet
            self.books.start(slot)
            self.relay.start(slot)

    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, self.slots - 1))
        self.books.start(slot)
        self.relay.start(slot)

    @precondition(lambda self: self.relay.steps - self.relay.lag < self.relay.pushed)
    @rule(seed=st.integers(0, 2**16), more=st.integers(0, 9), forced=st.sampled_from([-1, -1, 5]))
    def plan(self, seed: int, more: int, forced: int) -> None:
        rng = np.random.default_rng(seed)
        rows = int(rng.integers(1, self.slots + 1))
        slots = rng.permutation(self.slots)[:rows].astype(np.int32)
        drafts = rng.integers(-1, self.gamma + 2, rows).astype(np.int32)
        drafts[rng.random(rows) < 0.5] = self.gamma
        if rng.random() < 0.1:
            drafts = np.minimum(drafts, 0)
        more = max(0, more - 5)
        given = slots.tobytes(), (drafts + 1).tobytes(), rows + more
        source = self.relay.steps - self.relay.lag
        if not (drafts > 0).any():
            self.reached["no room"] += 1
            assert self.books.plan(*given, self.costs, forced) is None
            return
        if rng.random() < 0.1:
            self.reached["no table"] += 1
            assert self.books.plan(*given) is None
            self.relay.plan(slots)
            self.flying.append(drafts)
            return
        known = [bool(self.books.survivals_of(int(slot))) for slot in slots]
        found = self.books.plan(*given, self.costs, forced)
        survivals = self.relay.plan(slots)
        self.flying.append(drafts)
        if source < 0 or survivals is None:
            self.reached["too early"] += 1
            assert found is None
            assert survivals is None
            return
        assert found is not None
        assert (survivals[~np.array(known)] == 1.0).all()
        self.reached["known"] += sum(known)
        self.reached["not known"] += rows - sum(known)
        wanted = choose_budget(
            survivals, drafts, self.rates, self.limit, self.eps, given[2], self.graphs
        )
        assert found[1] == wanted.candidates
        self.reached["many"] += found[1] > 48
        if forced >= 0:
            self.reached["forced"] += 1
            assert found[0] == min(forced, int(np.maximum(drafts, 0).sum()))
        else:
            self.reached["some of them"] += 0 < found[0] < found[1]
            assert found[0] == wanted.drafts
            assert found[3] == pytest.approx(wanted.emitted / found[2], rel=1e-12)
        runs = given[2] + found[0]
        if not more:
            runs = int(run_sizes(np.array([runs]), rows, self.gamma + 1, self.graphs)[0])
        self.reached["in a larger graph"] += runs > given[2] + found[0]
        self.reached["in no graph"] += (
            not more and bool(self.graphs) and (rows * (self.gamma + 1) > self.graphs[-1])
        )
        assert found[2] == self.costs.seconds(rows, runs)

    @precondition(lambda self: len(self.flying) > 0)
    @rule(seed=st.integers(0, 2**16))
    def take(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        drafts = self.flying.pop(0)
        given = rng.random((int((drafts > 0).sum()), self.gamma), dtype=np.float32) ** 0.3
        given[rng.random(given.shape) < 0.2] = 0.5  # equals
        given[rng.random(given.shape) < 0.05] = rng.choice([np.nan, 0.0, 1.0, -0.0])
        self.reached["no number"] += bool(np.isnan(given).any())
        chunks = int32(5, 9)  # of prefill rows behind them
        self.books.take((drafts + 1).tobytes() + chunks, len(drafts), given.tobytes())
        self.relay.push(drafts > 0, given)


def test_any_order_of_events() -> None:
    wanted = ("no room", "no table", "too early", "known", "not known", "many", "forced",
              "some of them",
              "no number", "in a larger graph", "in no graph")  # fmt: skip
    run_until_reached(Machine, Machine.reached, wanted, examples=60, steps=30)
