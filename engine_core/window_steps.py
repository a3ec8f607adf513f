"""A draft window's pool among the scheduler's steps: who has which draft pages, what moved."""

from typing import NamedTuple, final

import numpy as np

from ..cython_ext.draft_window import DraftWindowSlotMap, DraftWindowStats
from ..cython_ext.request_table import RequestTable
from .draft_window import WindowPool
from .ids import I32

_NO_ROWS = 1 << 30  # a first position that no request gets to


class WindowChanges(NamedTuple):
    """What a step's plan says of draft pages: see ``window_*`` of StepPlan."""

    pages: bytes
    drafts: bytes
    lows: bytes


@final
class WindowSteps:
    """The requests that run, each a reader of its last window's draft pages.

    Calls in order: ``begin`` for each step that is planned, then ``verify`` and, for each prefill
    row, ``chunk``, then ``changes``; ``done`` with the step's result, before the requests that it
    ends leave. What a request leaves behind is held back until its last step is done.
    """

    def __init__(self, pool: WindowPool, target_pages: int, page_size: int, slots: int) -> None:
        self.map = DraftWindowSlotMap(target_pages, pool.pages, page_size, pool.window, slots)
        self.drafts = self.short_drafts = 0
        self._open = np.zeros(slots, dtype=np.bool_)
        self._step = self._done = 0

    @property
    def stats(self) -> DraftWindowStats:
        """Pages, and events so far."""
        return self.map.stats()

    def is_open(self, slot: int) -> bool:
        """Whether the slot's request has a window."""
        return bool(self._open[slot])

    def begin(self, step: int) -> None:
        """This step is being planned, perhaps once more: without rows its number is not used."""
        if step > self._step:
            self.map.begin_step(step)
            self._step = step

    def enter(self, slot: int, cached: int, length: int, pages: I32) -> None:
        """A request of ``length`` tokens enters with ``pages`` int32[n], ``cached`` of it computed.

        Of the cached ones it has the rows that others still have in their windows. What the rest
        of its prompt leaves outside the last window is not mapped at all.
        """
        self.map.attach(slot, cached, pages)
        self.map.slide(slot, length)
        self._open[slot] = True

    def chunk(self, slot: int, start: int, end: int, pages: I32) -> None:
        """The step has a prefill row over positions start .. end - 1, in ``pages`` int32[n]."""
        self.map.ensure(slot, start, end, pages)

    def verify(self, table: RequestTable, slots: I32, caps: I32) -> None:
        """The step has verify rows int32[V] of up to ``caps`` int32[V] tokens, see ``table``."""
        drafts, short = self.map.ensure_verify(table, slots, caps)
        self.drafts += drafts
        self.short_drafts += short

    def changes(self, slots: I32) -> WindowChanges:
        """What is new with a step of rows of these slots, int32[R]; told once."""
        pages, drafts = self.map.take_changes()
        lows = np.full(len(slots), _NO_ROWS, dtype=np.int32)
        open_ = self._open[slots]  # one that has left since its row was planned does not draft
        lows[open_] = self.map.lows(slots[open_])
        return WindowChanges(pages.tobytes(), drafts.tobytes(), lows.tobytes())

    def done(self, step: int) -> None:
        """The result of this step is in, or it will not come."""
        self.map.end_step(step)
        self._done = step

    def fail(self) -> None:
        """No result of any step will come."""
        if self._done < self._step:
            self.done(self._step)

    def leave(self, slot: int) -> None:
        """A request gets no more rows."""
        self.map.release(slot)
        self._open[slot] = False

    def freed(self, pages: I32) -> None:
        """Target pages int32[n] are free, and what is written there next has no draft rows yet."""
        self.map.on_target_free(pages)
