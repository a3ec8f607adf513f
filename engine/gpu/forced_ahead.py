"""What grammars force behind a step that is still in flight, and whether waiting for it pays.

A row in flight that has forced drafts, or none, emits one token more than it has drafts. If the
grammar forces that one too, the row's next forced tokens are known before its result is. What
such a row emits freely may be where another forced run begins; whether it is can be seen only
once it is in, and so it is of a row whose drafts are the device's own.
"""

from typing import NamedTuple, final

import numpy as np

from ...engine_core.ids import I32, RowKind, i32, u8
from ...engine_core.plan import StepPlan
from ..sampling.slot_grammars import SlotGrammars

# What a wait costs, in steps of an 8B model on an H200: the device stands still from a result to
# the next launch, and while the host asks each row's grammar what it forces.
_WAIT = 1 / 16
_ROW_WAIT = 1 / 256
_FIRST_RATE = 1 / 4  # of free tokens those that a forced run follows, until it is known better
_NEWEST = 1 / 8  # weight of the newest free token in that
_UNKNOWN = -1  # drafts that may hold or not


class _Flight(NamedTuple):
    """A slot's newest row: of which step, and its drafts, all of them forced, or ``_UNKNOWN``."""

    step: int
    drafts: int


@final
class ForcedAhead:
    """Flights of the slots that have a grammar. Decides by plans and results alone.

    ``started`` comes with every step that is launched, ``enter`` before it with slots that change
    hands, ``emitted`` with each row of a result before its grammar moves and ``moved`` after.
    """

    def __init__(self, grammars: SlotGrammars) -> None:
        self._grammars = grammars
        self._flights: dict[int, _Flight] = {}
        self._rates: dict[int, float] = {}
        self._free: set[int] = set()  # slots whose newest known token was free
        self._done = 0

    def reset(self) -> None:
        """Forget every slot; only while idle."""
        self._flights.clear()
        self._rates.clear()
        self._free.clear()

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots."""
        for init in plan.inits:
            self._flights.pop(init.slot, None)
            self._rates.pop(init.slot, None)
            self._free.discard(init.slot)

    def tokens(self, slot: int) -> int | None:
        """See ``TokensAhead``: counted from what the grammar forces behind the newest result."""
        drafts = self._in_flight(slot)
        if drafts is None:
            return 0
        return None if drafts == _UNKNOWN else drafts + 1

    def started(self, plan: StepPlan, counts: I32, forced: bytes, caps: I32) -> None:
        """A step is launched, with ``counts`` int32[R] drafts of its rows, and room for ``caps``
        more that the device makes.
        """
        certain = caps + counts == (i32(forced) if forced else 0)
        for row, slot in enumerate(i32(plan.slots).tolist()):
            if plan.kinds[row] != RowKind.PREFILL and self._grammars.run(slot) is not None:
                drafts = int(counts[row]) if certain[row] else _UNKNOWN
                self._flights[slot] = _Flight(plan.step, drafts)

    def worth_a_wait(self, plan: StepPlan) -> bool:
        """Whether a step should start only when the one in flight is known.

        So many of its verify rows must be expected to get a step ahead by that, that all together
        lose no time; and all must have a grammar: nobody else waits for what is not theirs.
        """
        verifies = np.flatnonzero(u8(plan.kinds) == RowKind.VERIFY)
        slots = i32(plan.slots)[verifies].tolist()
        if not slots or any(self._grammars.run(slot) is None for slot in slots):
            return False
        able = (i32(plan.q_caps)[verifies] > 1).tolist()
        gain = sum(self._gain(slot) for slot, may in zip(slots, able, strict=True) if may)
        return gain >= (_WAIT + _ROW_WAIT * len(slots)) * len(slots)

    def emitted(self, slot: int, count: int) -> None:
        """A row of a result emitted so many tokens, over which its grammar moves now."""
        run = self._grammars.run(slot)
        if run is not None and count > len(run):
            self._free.add(slot)

    def moved(self, slots: I32, step: int) -> None:
        """The grammars of a result's rows have moved: note which runs begin."""
        self._done = step
        if not self._free:
            return
        for slot in self._free.intersection(slots.tolist()):
            rate = self._rates.get(slot, _FIRST_RATE)
            began = bool(self._grammars.run(slot))
            self._rates[slot] = rate + (began - rate) * _NEWEST
            self._free.discard(slot)

    def _in_flight(self, slot: int) -> int | None:
        """Drafts of the slot's row in flight; None if there is none."""
        flight = self._flights.get(slot)
        return None if flight is None or flight.step <= self._done else flight.drafts

    def _gain(self, slot: int) -> float:
        """Of a row: 1 if waiting surely shows forced tokens, 0 if it surely shows none."""
        run, drafts = self._grammars.run(slot), self._in_flight(slot)
        if run is None or drafts is None:
            return 0.0
        known = len(run)
        if drafts == _UNKNOWN and known > 1:
            return 1.0
        if drafts != _UNKNOWN and known > drafts:
            return 0.0  # its bonus token is forced and more are known, or is the last of a run
        return self._rates.get(slot, _FIRST_RATE)
