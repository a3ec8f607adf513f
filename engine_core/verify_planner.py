"""The budget of each verify step in turn: late confidence, costs, and what overrides them."""

import math
from typing import final

from .confidence_relay import ConfidenceRelay
from .ids import F32, I32
from .sps_table import UNKNOWN, SpsTable
from .verify_budget import VerifyBudget, VerifyRules, choose_budget


@final
class VerifyPlanner:
    """One for all requests; calls as those of ``ConfidenceRelay``, and ``prefilled``.

    ``last``: what was decided for the last verify step; None after a step with prefill, and where
    everything is verified for want of confidence or of a table. Without a table (``costs`` None)
    that is always so.
    """

    def __init__(
        self, max_slots: int, rules: VerifyRules, costs: SpsTable | None = None, lag: int = 2
    ) -> None:
        self.rules = rules
        self.last: VerifyBudget | None = None
        self._costs: SpsTable = UNKNOWN if costs is None else costs
        self._relay = ConfidenceRelay(max_slots, rules.gamma, lag)
        self._fraction: float | None = None

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self._relay.start(slot)

    def push(self, confidence: F32) -> None:
        """See ``ConfidenceRelay``."""
        self._relay.push(confidence)

    def prefilled(self) -> None:
        """A step had prompts in it: what was decided before it holds no longer."""
        self.last = None

    def force(self, fraction: float | None) -> None:
        """Verify this fraction of all drafts from now on, whatever they promise; None: no more.

        Raises ValueError unless it is finite.
        """
        if fraction is not None and not math.isfinite(fraction):
            raise ValueError(f"fraction: must be finite, got {fraction}")
        self._fraction = fraction

    def plan(
        self, slots: I32, caps: I32 | None = None, batch_tokens: int | None = None
    ) -> VerifyBudget | None:
        """Decide on the next verify step, of rows ``slots`` int32[N]; None: verify all drafts.

        ``caps``, ``batch_tokens``: see ``choose_budget``.
        """
        survivals = self._relay.plan(slots)
        self.last = None
        if survivals is not None and (self._costs is not UNKNOWN or self._fraction is not None):
            self.last = choose_budget(
                survivals,
                self._costs,
                self.rules,
                caps=caps,
                batch_tokens=batch_tokens,
                fraction=self._fraction,
            )
        return self.last
