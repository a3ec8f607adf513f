"""The budget of each verify step in turn: late confidence, costs, and what overrides them.

A verify step's budget must be known before it is launched, and the confidence of its own drafts is
not. So the budget goes by that of the verify step ``lag`` before, which depends on earlier tokens
alone: no draft decides whether it is itself verified. Which step that is, is counted and never a
question of what happens to be ready, so a trace replays.
"""

import math
from collections.abc import Sequence
from typing import final

import numpy as np

from ..cython_ext.verify_books import StepCosts, VerifyBooks
from .sps_table import UNKNOWN, SpsTable
from .verify_budget import VerifyBudget, VerifyRules, forced_budget


@final
class VerifyPlanner:
    """For each verify step in order: ``plan`` when it is planned, ``push`` with its confidence when
    that is in, ``lag`` steps later at most. ``start`` once a slot has a new request.

    With ``lag`` 1 each step's confidence is in before the next one is planned: no overlap.
    ``sizes``: of the graphs that steps of verify rows alone run in, so that what a budget leaves of
    a graph is no saving (see ``VerifyBooks``). Raises ValueError for a lag below 1, and for sizes
    that do not rise.

    ``last``: what was decided for the last step; None where it had no room for drafts, and where
    everything is verified for want of confidence or of a table. Without a table (``costs`` None)
    that is always so.
    """

    def __init__(
        self,
        max_slots: int,
        rules: VerifyRules,
        costs: SpsTable | None = None,
        lag: int = 2,
        sizes: Sequence[int] = (),
    ) -> None:
        self.rules = rules
        self.last: VerifyBudget | None = None
        self._table: StepCosts | None = None if costs is None or costs is UNKNOWN else costs.costs
        graphs = np.array(sizes, dtype=np.int32).tobytes()
        self._books = VerifyBooks(max_slots, rules.gamma, lag, rules.limit, rules.eps, graphs)
        self._fraction: float | None = None

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self._books.start(slot)

    def push(self, q_caps: bytes, rows: int, confidence: bytes) -> None:
        """Take confidence float32[D, gamma] of the oldest step whose confidence is not in.

        Its D rows are those of the step's ``rows`` verify rows, the first of ``q_caps`` int32,
        that have room for drafts; without any nothing is taken. Raises ValueError for the
        confidence of other rows, RuntimeError if there is no such step.
        """
        self._books.take(q_caps, rows, confidence)

    def force(self, fraction: float | None) -> None:
        """Verify this fraction of all drafts from now on, whatever they promise; None: no more.

        Raises ValueError unless it is finite.
        """
        if fraction is not None and not math.isfinite(fraction):
            raise ValueError(f"fraction: must be finite, got {fraction}")
        self._fraction = fraction

    def plan(self, slots: bytes, q_caps: bytes, batch_tokens: int) -> VerifyBudget | None:
        """Decide on the next verify step, of rows ``slots`` int32[N]; None: verify all drafts.

        ``q_caps`` int32[N]: their query tokens at most. ``batch_tokens``: the step's tokens without
        any draft. A row whose request was not in the step ``lag`` before, or did not draft there,
        counts as sure, so that a new request is verified in full. A step without room for drafts
        is none of the planner's, which does not count it. Raises RuntimeError if confidence that
        is needed should be in and is not.
        """
        table, forced = self._table, -1
        if self._fraction is not None:
            forced = forced_budget(self._fraction, len(slots) // 4, self.rules.gamma)
            table = table or UNKNOWN.costs
        found = self._books.plan(slots, q_caps, batch_tokens, table, forced)
        self.last = None if found is None else VerifyBudget(*found)
        return self.last
