"""The planner of verify lengths among the scheduler's steps: budgets out, confidence in."""

from typing import final

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

    def plan(self, slots: bytes, q_caps: bytes, batch_tokens: int) -> int:
        """Drafts that the step's verify rows int32[V] have verified together, or VERIFY_ALL.

        ``q_caps`` int32[V]: their query tokens at most. ``batch_tokens``: the step's without any
        draft.
        """
        budget = self.planner.plan(slots, q_caps, batch_tokens)
        return VERIFY_ALL if budget is None else budget.drafts

    def committed(self, plan: StepPlan, result: StepResult) -> None:
        """Take the confidence of the oldest step. Raises WorkerFailed if it does not fit."""
        try:
            self.planner.push(plan.q_caps, plan.verify_rows, result.confidence)
        except ValueError as error:
            raise WorkerFailed(f"step {plan.step}: {error}") from error

    def reset(self) -> None:
        """The steps in flight will not come back, nor will their requests."""
        self.planner = self._new_planner()

    def _new_planner(self) -> VerifyPlanner:
        ragged = self._ragged
        return VerifyPlanner(self._max_slots, ragged.rules, ragged.costs, sizes=ragged.sizes)
