"""Confidence that comes back late: what the host knows of a step's drafts, some steps afterwards.

A verify step's budget must be known before it is launched, and the confidence of its own drafts is
not. So the budget goes by that of the verify step ``lag`` before, which depends on earlier tokens
alone: no draft decides whether it is itself verified. Which step that is, is counted and never a
question of what happens to be ready, so a trace replays.
"""

from collections import deque
from typing import NamedTuple, final

import numpy as np

from .ids import F32, I32, I64
from .verify_budget import survival


class _Planned(NamedTuple):
    """A step whose confidence is not in yet: its slots, and who was in them."""

    slots: I32
    generations: I64


@final
class ConfidenceRelay:
    """For each verify step in order: ``plan`` when it is planned, ``push`` with its confidence when
    that is in, ``lag`` steps later at most. ``start`` once a slot has a new request.

    With ``lag`` 1 each step's confidence is in before the next one is planned: no overlap. Raises
    ValueError for a lag below 1.
    """

    def __init__(self, max_slots: int, gamma: int, lag: int = 2) -> None:
        if lag < 1:
            raise ValueError(f"lag: must be 1 or more, got {lag}")
        self.lag = lag
        self._generations = np.zeros(max_slots, dtype=np.int64)
        # Ring of the last ``lag`` steps: confidence, and the generation that it is of; 0: none.
        self._confidence = np.zeros((lag, max_slots, gamma), dtype=np.float32)
        self._recorded = np.zeros((lag, max_slots), dtype=np.int64)
        self._planned = deque[_Planned]()
        self._steps = 0  # planned
        self._pushed = 0

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self._generations[slot] += 1

    def plan(self, slots: I32) -> F32 | None:
        """Survival float32[N, gamma] of the rows of the next step, by the step ``lag`` before.

        A row whose request was not in that step counts as sure, so that a new request is verified
        in full. None, and a budget cannot be had, until there is such a step. Raises RuntimeError
        if its confidence should be in and is not.
        """
        source = self._steps - self.lag
        if source >= self._pushed:
            raise RuntimeError(
                f"verify step {self._steps} goes by step {source}, but {self._pushed} are in"
            )
        self._planned.append(_Planned(slots.copy(), self._generations[slots]))
        self._steps += 1
        if source < 0:
            return None
        layer = source % self.lag
        now = self._generations[slots]
        known = (now >= 1) & (self._recorded[layer, slots] == now)
        return np.where(known[:, None], survival(self._confidence[layer, slots]), np.float32(1.0))

    def push(self, confidence: F32) -> None:
        """Take confidence float32[R, gamma] of the oldest step whose confidence is not in.

        Its rows are those of the plan. Raises RuntimeError if there is no such step.
        """
        if not self._planned:
            raise RuntimeError("confidence of a step that was not planned")
        slots, generations = self._planned.popleft()
        layer = self._pushed % self.lag
        # A row that this step lacks must not pass for one of it.
        self._recorded[layer] = 0
        self._recorded[layer, slots] = generations
        self._confidence[layer, slots] = confidence
        self._pushed += 1
