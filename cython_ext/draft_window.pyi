"""Map from target KV slots to a compact pool that keeps a drafter's KV of a sliding window."""

from typing import NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from .request_table import RequestTable

class DraftWindowStats(NamedTuple):
    """Page counts, and events so far; see `DraftWindowSlotMap.stats`."""

    live_pages: int
    deferred_pages: int
    free_pages: int
    high_water: int
    alloc_failures: int
    rows_found: int
    rows_missing: int

class WindowState(NamedTuple):
    """A request's bounds, and the target pages that it reads."""

    low: int
    floor: int
    end: int
    pages: NDArray[np.int32]

@final
class DraftWindowSlotMap:
    """Draft pages of the requests' windows, by target page. Page 0 of the pool is the sink.

    Requests are named by their slot; `pages` is a request's page-table row, int32.
    ValueError names the argument that does not fit, and nothing has changed then.
    """

    def __new__(
        cls, target_pages: int, pool_pages: int, page_size: int, window: int, max_slots: int
    ) -> Self: ...
    @property
    def page_size(self) -> int:
        """Tokens in a page, of the target's and of the draft's."""

    @property
    def window(self) -> int:
        """Committed tokens that a request's draft reads, at least."""

    @property
    def pool_pages(self) -> int:
        """Pages of the draft pool, the sink included."""

    @property
    def table(self) -> NDArray[np.int32]:
        """Read-only view of the map itself: int32 [target_pages + 1], draft pages, 0 for none."""

    def stats(self) -> DraftWindowStats:
        """Page counts, and events so far.

        live_pages have an owner, deferred_pages wait for a step, free_pages can be taken; their sum
        is all but the sink. high_water: most pages live or deferred at once. alloc_failures: times
        that `ensure` found no page. rows_found and rows_missing: of the windows of attached
        prefixes, those that had draft rows and those that had none.
        """

    def state(self, slot: int) -> WindowState:
        """A request's low, floor and end, and the target pages (int32 [n]) it reads."""

    def lows(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """First position with draft rows of each request: int32 [R]."""

    def begin_step(self, step: int) -> None:
        """The step of this number, higher than any before, is being planned."""

    def end_step(self, step: int) -> None:
        """The result of this step is in, and of those before: what they read may be reused."""

    def rows_from(self, position: int, pages: NDArray[np.int32]) -> int:
        """Where the draft rows begin that `attach` would find; `position` if there are none."""

    def attach(self, slot: int, position: int, pages: NDArray[np.int32]) -> int:
        """Track a request that will write draft rows from `position` on; returns its `low`.

        `pages` hold whole, computed tokens up to there. Those whose draft pages are in the window
        of others, up to `position` without a gap, are read from now on.
        """

    def ensure(self, slot: int, start: int, end: int, pages: NDArray[np.int32]) -> int:
        """Map positions start .. end - 1 of a request, which has a row in the step being planned.

        Returns how many pages could not be had: their positions are the sink's.
        """

    def ensure_verify(
        self, table: RequestTable, slots: NDArray[np.int32], caps: NDArray[np.int32]
    ) -> tuple[int, int]:
        """`slide` and `ensure` for the newest verify rows of these slots, int32 [n], of `table`.

        `caps` int32 [n]: their query tokens, at most. Returns how many drafts they have together,
        and how many of them belong to rows that do not have all of their window.
        """

    def take_changes(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Target pages that have had another draft page, or none, since the last call, int32 [n],
        and what they have now, int32 [n]. In the order in which they changed first.
        """

    def slide(self, slot: int, length: int) -> None:
        """No step planned from now on reads what is more than a window below `length`."""

    def release(self, slot: int) -> int:
        """Stop tracking a request; returns how many draft pages that sets free, now or later.

        Nothing happens for a slot without one.
        """

    def on_target_free(self, pages: NDArray[np.int32]) -> int:
        """Target pages (int32 [n]) are given back; returns how many draft pages that sets free.

        Requests that still have one in their window lose it with all that follows.
        """

    def reset(self) -> None:
        """Forget every request; RuntimeError while a step is in flight."""

    def check(self) -> None:
        """Raise AssertionError that names the invariant which fails."""

    def corrupt_for_test(self, kind: str) -> None:
        """Damage the state so that a test can see `check` notice."""
