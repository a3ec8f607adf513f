"""The planner of verify lengths among the scheduler's steps: budgets out, confidence in."""

from typing import final

import numpy as np

from .ids import F32, I32, RowKind, i32, u8
from .plan import StepPlan, StepResult
from .ragged_verify import RaggedVerify
from .verify_planner import VerifyPlanner
from .worker import WorkerFailed

VERIFY_ALL = -1


@final
class VerifySteps:
    """Calls in order: ``start`` and ``plan`` for each step, ``committed`` with its result.

    Only steps with room for drafts are the planner's; it counts these alone.
    """

    def __init__(self, ragged: RaggedVerify, max_slots: int) -> None:
        self._ragged = ragged
        self._max_slots = max_slots
        self.planner = self._new_planner()

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self.planner.start(slot)

    def plan(self, slots: I32, drafts: I32, batch_tokens: int) -> int:
        """Drafts that the step's verify rows int32[V] have verified together, or VERIFY_ALL.

        ``drafts`` int32[V]: room for them by row. ``batch_tokens``: the step's without any draft.
        """
        if not drafts.any():
            self.planner.prefilled()
            return VERIFY_ALL
        budget = self.planner.plan(slots, drafts, batch_tokens)
        if budget is None:
            return VERIFY_ALL
        return min(budget.drafts, int(drafts.sum()))

    def committed(self, plan: StepPlan, result: StepResult) -> None:
        """Take the confidence of the oldest step. Raises WorkerFailed if it does not fit."""
        gamma = self._ragged.rules.gamma
        drafts = drafting_caps(plan)
        rows = int((drafts > 0).sum())
        if len(result.confidence) != 4 * rows * gamma:
            raise WorkerFailed(
                f"step {plan.step}: {len(result.confidence)} bytes of confidence came for {rows} "
                f"rows of {gamma} drafts"
            )
        if not rows:
            return
        # A row that did not draft tells nothing and counts as sure, like one that was not there.
        confidence: F32 = np.ones((len(drafts), gamma), dtype=np.float32)
        given = np.frombuffer(result.confidence, dtype=np.float32).reshape(rows, gamma)
        confidence[drafts > 0] = np.nan_to_num(given, nan=0.0)
        self.planner.push(confidence)

    def reset(self) -> None:
        """The steps in flight will not come back, nor will their requests."""
        self.planner = self._new_planner()

    def _new_planner(self) -> VerifyPlanner:
        return VerifyPlanner(self._max_slots, self._ragged.rules, self._ragged.costs)


def drafting_caps(plan: StepPlan) -> I32:
    """int32[V]: drafts that the plan's verify rows have room for; of none but late-bound steps
    they are the drafter's on the device."""
    drafts: I32 = i32(plan.q_caps)[u8(plan.kinds) == RowKind.VERIFY] - 1
    return drafts
