"""The length controller on synthetic processes: as good as the best fixed length, and quick."""

import numpy as np
import pytest

from outrider.engine_core.controller import (
    NO_MATCH,
    NO_PROPOSAL,
    NO_ROOM,
    NOT_PROFITABLE,
    OFF_BY_REQUEST,
    REASONS,
    LengthController,
)
from outrider.engine_core.ids import F32, I32
from outrider.engine_core.plan import StepResult
from outrider.engine_core.step_times import StepTimes

from .draft_process import LATE, WIDTH, DraftProcess, Times, constant

SHAPES: dict[str, Times] = {
    "flat": lambda n: 2e-3 + 2e-5 * n,
    "sloped": lambda n: 1.5e-3 + 1e-4 * n,
    "steep": lambda n: 2e-4 + 3e-4 * n,
    "steps": lambda n: 1e-3 + 5e-4 * ((n + 15) // 16),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("p", [0.02, 0.3, 0.6, 0.95])
def test_within_three_percent_of_the_best_fixed_length(shape: str, rows: int, p: float) -> None:
    steps = 2000 // rows + 200
    process = DraftProcess(rows, SHAPES[shape], constant(p))
    controller = process.controller()
    process.run(controller, 60)
    # Between its knots the table cannot see the steps of many rows.
    share = 0.93 if shape == "steps" and rows > 1 else 0.97
    assert process.run(controller, steps).rate >= share * process.expected_fixed(1)


@pytest.mark.parametrize("rows", [1, 8])
def test_copied_and_novel_text_in_turns_beats_every_fixed_length(rows: int) -> None:
    def copied(row: int, step: int) -> bool:
        return (step // 40 + row) % 2 == 1

    process = DraftProcess(
        rows,
        SHAPES["sloped"],
        lambda row, step: 0.95 if copied(row, step) else 0.15,
        lambda row, step: 12 if copied(row, step) else 2,
    )
    rate = process.run(process.controller(), 800).rate
    assert rate >= 1.1 * process.expected_fixed(800)


def test_drafting_starts_within_four_steps_of_copied_text() -> None:
    """Shadows show the long match; one plan later the step is late-bound."""
    process = DraftProcess(
        1, SHAPES["sloped"],
        lambda row, step: 0.0 if step < 100 else 0.97,
        lambda row, step: 1 if step < 100 else 14,
    )  # fmt: skip
    outcome = process.run(process.controller(), 140)
    assert not any(outcome.late[20:100])
    first = outcome.late.index(True, 100)
    assert first <= 104
    assert outcome.drafts[first + 6] >= 5


def test_equal_matches_of_changed_worth_are_relearned() -> None:
    """The context looks the same throughout; only the outcomes tell."""
    process = DraftProcess(
        1, SHAPES["sloped"], lambda row, step: 0.02 if 200 <= step < 400 else 0.95
    )
    outcome = process.run(process.controller(), 500)
    assert sum(outcome.late[150:200]) == 50
    assert sum(outcome.late[260:400]) == 0, "worthless drafts are off after 60 steps"
    assert sum(outcome.late[470:500]) == 30, "shadows alone bring them back within 70"


def test_novel_text_costs_no_verify_and_no_waiting() -> None:
    process = DraftProcess(8, SHAPES["sloped"], constant(0.03), lambda row, step: 2)
    outcome = process.run(process.controller(), 300)
    assert not any(outcome.late[10:])
    assert sum(outcome.drafts[10:]) == 0


def test_the_same_inputs_give_the_same_decisions() -> None:
    outcomes = []
    for _ in range(2):
        process = DraftProcess(4, SHAPES["sloped"], constant(0.5))
        outcomes.append(process.run(process.controller(), 100))
    assert outcomes[0] == outcomes[1]


def make(
    policy: str = "auto", times: tuple[float, float] = (1e-3, 1.1e-3), slots: int = 4
) -> LengthController:
    assert policy in ("auto", "fixed")
    table = StepTimes([1, 64], list(times))
    controller = LengthController(
        table, slots, WIDTH, "fixed" if policy == "fixed" else "auto", late_seconds=1e-5
    )
    for slot in range(slots):
        controller.start(slot)
    return controller


def i32(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def chains(*lengths: int) -> tuple[I32, I32, I32, I32, F32]:
    rows = len(lengths)
    tokens = np.tile(np.arange(1, WIDTH + 1, dtype=np.int32), (rows, 1))
    parents = np.tile(np.arange(WIDTH, dtype=np.int32), (rows, 1))
    weights = np.ones((rows, WIDTH), dtype=np.float32)
    return i32(*lengths), np.full(rows, 15, dtype=np.int32), tokens, parents, weights


def test_every_row_without_drafts_has_its_reason() -> None:
    controller = make()
    slots = i32(0, 1, 2, 3)
    room = i32(5, 5, 0, -1)
    first = controller.plan(slots, room, 4)
    assert not first.late_bound
    assert first.reasons.tolist() == [NO_PROPOSAL, NO_PROPOSAL, NO_ROOM, OFF_BY_REQUEST]
    assert first.caps.tolist() == [0, 0, 0, 0]
    controller.offer(slots, *chains(4, 0, 4, 4))
    second = controller.plan(slots, room, 4)
    assert second.late_bound
    assert second.caps.tolist() == [5, 5, 0, 0]
    bound = controller.bind(slots, second.caps, 4, 4)
    assert bound.counts.tolist() == [4, 0, 0, 0]
    assert bound.tokens.tolist() == [1, 2, 3, 4]
    assert bound.parents.tolist() == [0, 1, 2, 3]
    assert bound.reasons.tolist() == [0, NO_MATCH, 0, 0]
    assert all(REASONS[code] for code in range(1, len(REASONS)))
    assert REASONS[0] is None


def test_what_does_not_pay_is_not_profitable_by_name() -> None:
    steep = make(times=(1e-3, 64e-3))
    slots, room = i32(0, 1), i32(5, 5)
    steep.offer(slots, *chains(4, 0))
    assert steep.plan(slots, room, 2).reasons.tolist() == [NOT_PROFITABLE, NO_MATCH]
    bound = steep.bind(slots, room, 2, 2)
    assert bound.reasons.tolist() == [NOT_PROFITABLE, NO_MATCH]


def test_fixed_drafts_whatever_it_costs_but_never_above_the_cap() -> None:
    fixed = make("fixed", times=(1e-3, 64e-3))
    slots = i32(0, 1, 2)
    lengths = fixed.plan(slots, i32(3, 40, -1), 3)
    assert lengths.late_bound
    assert lengths.caps.tolist() == [3, WIDTH, 0]
    assert fixed.plan(i32(2), i32(-1), 1).late_bound is False
    fixed.offer(slots, *chains(9, 9, 9))
    assert fixed.bind(slots, lengths.caps, 3, 3).counts.tolist() == [3, 9, 0]


def test_the_cost_of_late_binding_is_what_results_say() -> None:
    controller = make()
    for wait in (200, 300, 90_000_000):
        controller.observe(StepResult(1, b"", b"", b"", b"", wait_ns=wait * 1000), True)
    assert controller.late_seconds == pytest.approx(300e-6)
    controller.observe(StepResult(1, b"", b"", b"", b"", wait_ns=0), True)
    assert controller.late_seconds == pytest.approx(300e-6)


def test_steps_with_prefill_rows_say_nothing_of_decode_steps() -> None:
    controller = make(times=(1e-3, 2e-3))
    before = controller.times.table.copy()
    slow = StepResult(1, b"", b"", b"", b"", busy_ns=10**9, batch_tokens=8)
    for _ in range(64):
        controller.observe(slow, False)
    np.testing.assert_array_equal(controller.times.table, before)
    for _ in range(64):
        controller.observe(slow, True)
    assert controller.times.seconds(8) == pytest.approx(1.0)


def test_a_target_alone_needs_no_drafts() -> None:
    """Width 0: num_draft_tokens is 1, only the bonus token is verified."""
    controller = LengthController(StepTimes([1, 2], [1.0, 2.0]), 1, 0, "fixed")
    controller.start(0)
    assert controller.plan(i32(0), i32(5), 1).late_bound is False
    assert LATE > 0
