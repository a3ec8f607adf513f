# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Map from target KV slots to a compact pool that keeps a drafter's KV of a sliding window.

A target page has at most one draft page, and offset o of the one is offset o of the other. Draft
page 0 is the sink: what has no page is written there.

Requests that share a target page through the radix tree share its draft page. Whoever has the page
in its window is one of its readers; the last one to stop reading frees it. It can be taken anew
once the last step that had a row of any of its readers is done. So a cached prefix has draft rows
as far as a running request still has them in its window.

Invariants, by the names that `check` reports:

    I1  the target page of a draft page maps to it, and nothing else does
    I2  a draft page is free, held back for a step, or owned: one of them, once
    I3  a request's positions from `low` to `end` are mapped: `low` is beyond those that failed
    I4  page 0 is neither free nor owned
    I5  a target page's readers are the requests that have it in their window; with the last one
        its draft page goes, and the count of live pages is that of owned ones
    I6  no page is free before the last step that reads it is done, nor held back after it
    I7  what a request reads was written since the page has its owner
"""

from collections import namedtuple

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memmove, memset

from .page_allocator cimport PageAllocator
from .request_table cimport Entry, RequestTable

import numpy as np

DraftWindowStats = namedtuple(
    "DraftWindowStats",
    (
        "live_pages", "deferred_pages", "free_pages", "high_water", "alloc_failures",
        "rows_found", "rows_missing",
    ),
    module=__name__,
)
WindowState = namedtuple("WindowState", ("low", "floor", "end", "pages"), module=__name__)

cdef enum:
    MOST_SLOTS = 2147483647


cdef inline int64_t pages_for(int64_t positions, int64_t page_size) noexcept:
    return (positions + page_size - 1) // page_size


@cython.final
cdef class DraftWindowSlotMap:
    """Draft pages of the requests' windows, by target page.

    Target pages are 1..target_pages; the draft pool has pool_pages, of which page 0 is the sink.
    Requests are named by their slot, 0..max_slots - 1; positions are sequence indexes, and `pages`
    is always the request's page-table row: int32, the target page of each `page_size` positions.

    A step's plan is `begin_step`, then `slide` and `ensure` for each row; `end_step` comes with the
    step's result, before the releases that follow from it. Without steps pages are free at once.

    ValueError names the argument that does not fit, and nothing has changed then.
    """

    def __cinit__(
        self,
        int32_t target_pages,
        int32_t pool_pages,
        int32_t page_size,
        int32_t window,
        int32_t max_slots,
    ):
        if target_pages < 1 or page_size < 1 or window < 1 or max_slots < 1:
            raise ValueError(
                f"target_pages {target_pages}, page_size {page_size}, window {window} and "
                f"max_slots {max_slots} must be 1 or more"
            )
        if pool_pages < 2:
            raise ValueError(f"pool_pages is {pool_pages}: give the sink and at least one page")
        if (<int64_t>max(target_pages, pool_pages) + 1) * page_size > MOST_SLOTS:
            raise ValueError(
                f"target_pages {target_pages} or pool_pages {pool_pages} of page_size {page_size} "
                "have more slots than an int32 counts"
            )
        self._target_pages = target_pages
        self._pool_pages = pool_pages
        self._page_size = page_size
        self._window = window
        self._max_slots = max_slots
        self._table = np.zeros(target_pages + 1, np.int32)
        self._map = self._table
        self._readers = <int32_t *>calloc(target_pages + 1, sizeof(int32_t))
        self._freed = <uint8_t *>calloc(target_pages + 1, 1)
        self._changed = <int32_t *>calloc(target_pages + 1, sizeof(int32_t))
        self._is_changed = <uint8_t *>calloc(target_pages + 1, 1)
        self._pages = <DraftPage *>calloc(pool_pages, sizeof(DraftPage))
        self._deferred = <int32_t *>calloc(pool_pages, sizeof(int32_t))
        self._windows = <Window *>calloc(max_slots, sizeof(Window))
        if (
            self._readers is NULL or self._freed is NULL or self._pages is NULL
            or self._deferred is NULL or self._windows is NULL
            or self._changed is NULL or self._is_changed is NULL
        ):
            raise MemoryError(f"no memory for the map of {target_pages} pages")
        self._pool = PageAllocator(pool_pages - 1)

    def __dealloc__(self):
        cdef int32_t slot
        if self._windows is not NULL:
            for slot in range(self._max_slots):
                free(self._windows[slot].pages)
        free(self._windows)
        free(self._readers)
        free(self._freed)
        free(self._changed)
        free(self._is_changed)
        free(self._pages)
        free(self._deferred)

    cdef Window *_entry(self, int32_t slot) except NULL:
        if slot < 0 or slot >= self._max_slots:
            raise ValueError(f"slot {slot} is outside 0..{self._max_slots - 1}")
        return &self._windows[slot]

    cdef Window *_opened(self, int32_t slot) except NULL:
        cdef Window *window = self._entry(slot)
        if not window.open:
            raise ValueError(f"slot {slot} is not attached")
        return window

    cdef int _require_columns(
        self, const int32_t[::1] pages, int64_t start, int64_t end, str name
    ) except -1:
        """Refuse a row without real pages for positions start .. end - 1."""
        cdef int64_t column
        if end > pages.shape[0] * <int64_t>self._page_size:
            raise ValueError(
                f"{name} is {end} but pages hold {pages.shape[0] * self._page_size} positions"
            )
        for column in range(start // self._page_size, pages_for(end, self._page_size)):
            if not 0 < pages[column] <= self._target_pages:
                raise ValueError(
                    f"pages[{column}] is {pages[column]}, outside 1..{self._target_pages}"
                )
        return 0

    cdef int64_t _window_start(self, int64_t length) noexcept:
        """First position that a request of `length` committed tokens reads, page-aligned."""
        return max(length - self._window, <int64_t>0) // self._page_size * self._page_size

    cdef int64_t _rows_from(self, int64_t position, const int32_t[::1] pages) noexcept:
        """Where the rows begin that reach up to `position` without a gap, inside its window."""
        cdef int64_t low = position, first, column = (position - 1) // self._page_size
        cdef DraftPage *page
        while position > 0 and column >= self._window_start(position) // self._page_size:
            page = &self._pages[self._map[pages[column]]]
            first = column * self._page_size
            if page.owner == 0 or page.until < min(position - first, <int64_t>self._page_size):
                break
            low = min(low, first + page.begin)
            if page.begin > 0:
                break
            column -= 1
        return low

    cdef int _append(self, Window *window, int32_t page) except -1:
        cdef int32_t *pages
        if window.count == window.room:
            pages = <int32_t *>realloc(window.pages, (2 * window.room + 8) * sizeof(int32_t))
            if pages is NULL:
                raise MemoryError("no memory for the pages of a window")
            window.pages = pages
            window.room = 2 * window.room + 8
        window.pages[window.count] = page
        window.count += 1
        self._readers[page] += 1
        return 0

    cdef void _set(self, int32_t target, int32_t draft) noexcept:
        self._map[target] = draft
        if not self._is_changed[target]:
            self._is_changed[target] = 1
            self._changed[self._changed_count] = target
            self._changed_count += 1

    cdef void _stop_reading(self, Window *window, int32_t page) noexcept:
        cdef int32_t draft = self._map[page]
        cdef DraftPage *state = &self._pages[draft]
        self._readers[page] -= 1
        if draft == 0:
            return
        state.last_step = max(state.last_step, window.last_step)
        if self._readers[page]:
            return
        self._set(page, 0)
        state.owner = 0
        self._live -= 1
        if state.last_step <= self._done:
            self._pool.give(draft)
        else:
            self._deferred[self._deferred_count] = draft
            self._deferred_count += 1

    cdef void _drop_below(self, Window *window, int64_t column) noexcept:
        """Stop reading the columns below this one."""
        cdef int32_t i, count
        if column <= window.first:
            return
        count = <int32_t>min(column - window.first, <int64_t>window.count)
        for i in range(count):
            self._stop_reading(window, window.pages[i])
        window.count -= count
        memmove(window.pages, window.pages + count, window.count * sizeof(int32_t))
        window.first = <int32_t>column

    cdef void _cut(self, Window *window, int64_t column) noexcept:
        """Stop reading this column and those after it."""
        cdef int32_t i, kept = <int32_t>(column - window.first)
        for i in range(kept, window.count):
            self._stop_reading(window, window.pages[i])
        window.count = kept
        window.end = <int32_t>min(<int64_t>window.end, column * self._page_size)

    cdef void _slide(self, Window *window, int64_t length) noexcept:
        cdef int32_t start = <int32_t>self._window_start(length)
        window.floor = max(window.floor, start)
        window.low = max(window.low, start)
        self._drop_below(window, window.floor // self._page_size)

    cdef int32_t _take(self, int32_t target, int64_t begin) noexcept:
        """A page for this target page, or 0; its rows are going to be written from `begin` on."""
        cdef int32_t draft = self._pool.take()
        cdef DraftPage *page = &self._pages[draft]
        if draft == 0:
            return 0
        page.owner = target
        page.begin = <int32_t>max(<int64_t>0, min(begin, <int64_t>self._page_size))
        page.until = page.begin
        page.last_step = 0
        self._set(target, draft)
        self._live += 1
        self._high_water = max(self._high_water, self._live + self._deferred_count)
        return draft

    cdef int64_t _write(
        self, Window *window, int32_t column, int64_t start, int64_t end, int64_t length
    ) noexcept:
        """Map one column for start .. end - 1 inside it; from where on its rows can be read.

        That is `end` without a page. `length`: committed tokens, to slide by when none is free.
        """
        cdef int64_t first = <int64_t>column * self._page_size
        cdef int32_t target = window.pages[column - window.first]
        cdef int32_t draft = self._map[target]
        cdef int64_t begin = max(<int64_t>window.low, start) - first
        cdef DraftPage *page
        if draft == 0:
            draft = self._take(target, begin)
            if draft == 0:
                self._slide(window, length)
                draft = self._take(target, begin)
            if draft == 0:
                self._failures += 1
                return end
        page = &self._pages[draft]
        if start - first > page.until:
            # Rows before these were never written: that is for all readers to know, or for one.
            if self._readers[target] > 1:
                return first + self._page_size
            page.begin = <int32_t>(start - first)
        page.until = <int32_t>max(<int64_t>page.until, end - first)
        return first + page.begin if page.begin else 0

    cdef int _require_follows(
        self, Window *window, int32_t slot, int64_t start, int64_t end, const int32_t[::1] pages
    ) except -1:
        """Refuse positions before the window, and another page where one is tracked."""
        cdef int64_t column, tracked = window.first + window.count
        if start < window.first * <int64_t>self._page_size:
            raise ValueError(
                f"start is {start}, but slot {slot} begins at {window.first * self._page_size}"
            )
        for column in range(start // self._page_size, pages_for(end, self._page_size)):
            if column < tracked and pages[column] != window.pages[column - window.first]:
                raise ValueError(
                    f"pages[{column}] is {pages[column]}, but slot {slot} has page "
                    f"{window.pages[column - window.first]} there: tell on_target_free first"
                )
        return 0

    @property
    def page_size(self):
        """Tokens in a page, of the target's and of the draft's."""
        return self._page_size

    @property
    def window(self):
        """Committed tokens that a request's draft reads, at least."""
        return self._window

    @property
    def pool_pages(self):
        """Pages of the draft pool, the sink included."""
        return self._pool_pages

    @property
    def table(self):
        """Read-only view of the map itself: int32 [target_pages + 1], draft pages, 0 for none."""
        view = self._table.view()
        view.flags.writeable = False
        return view

    def stats(self):
        """Page counts and events so far as DraftWindowStats.

        live_pages have an owner, deferred_pages wait for a step, free_pages can be taken; their sum
        is all but the sink. high_water: most pages live or deferred at once. alloc_failures: times
        that `ensure` found no page. rows_found and rows_missing: of the windows of attached
        prefixes, those that had draft rows and those that had none.
        """
        return DraftWindowStats(
            self._live, self._deferred_count, self._pool.free_pages, self._high_water,
            self._failures, self._rows_found, self._rows_missing,
        )

    def state(self, int32_t slot):
        """A request's WindowState: low, floor, end, and the target pages (int32 [n]) it reads."""
        cdef Window *window = self._opened(slot)
        cdef int32_t i
        pages = np.empty(window.count, np.int32)
        cdef int32_t[::1] view = pages
        for i in range(window.count):
            view[i] = window.pages[i]
        return WindowState(window.low, window.floor, window.end, pages)

    def lows(self, const int32_t[::1] slots not None):
        """First position with draft rows of each request: int32 [R]."""
        cdef Py_ssize_t i
        out = np.empty(slots.shape[0], np.int32)
        cdef int32_t[::1] view = out
        for i in range(slots.shape[0]):
            view[i] = self._opened(slots[i]).low
        return out

    def begin_step(self, int64_t step):
        """The step of this number, higher than any before, is being planned."""
        if step <= self._step:
            raise ValueError(f"step is {step}: step {self._step} was begun before")
        self._step = step

    def end_step(self, int64_t step):
        """The result of this step is in, and of those before: what they read may be reused."""
        cdef int32_t i, kept = 0
        if not self._done < step <= self._step:
            raise ValueError(f"step is {step}: of those in flight, {self._done + 1}..{self._step}")
        self._done = step
        for i in range(self._deferred_count):
            if self._pages[self._deferred[i]].last_step <= step:
                self._pool.give(self._deferred[i])
            else:
                self._deferred[kept] = self._deferred[i]
                kept += 1
        self._deferred_count = kept

    def rows_from(self, int32_t position, const int32_t[::1] pages not None):
        """Where the draft rows begin that `attach` would find; `position` if there are none."""
        if position < 0:
            raise ValueError(f"position is {position}: it cannot be negative")
        self._require_columns(pages, self._window_start(position), position, "position")
        return self._rows_from(position, pages)

    def attach(self, int32_t slot, int32_t position, const int32_t[::1] pages not None):
        """Track a request that will write draft rows from `position` on; returns its `low`.

        `pages` hold whole, computed tokens up to there. Those whose draft pages are in the window
        of others, up to `position` without a gap, are read from now on. For a cached prefix
        without draft rows either attach at its end (`low` is `position`: the window fills up
        again), or attach a window before it and compute those positions again.
        """
        cdef Window *window = self._entry(slot)
        cdef int64_t low, wanted, column
        if window.open:
            raise ValueError(f"slot {slot} is attached: release it first")
        low = self.rows_from(position, pages)
        window.open = True
        window.low = <int32_t>low
        window.floor = <int32_t>self._window_start(position)
        window.end = position
        window.first = <int32_t>(low // self._page_size)
        window.count = 0
        window.last_step = 0
        if low < position:
            for column in range(window.first, pages_for(position, self._page_size)):
                self._append(window, pages[column])
        wanted = max(0, position - self._window)
        self._rows_found += position - max(low, wanted)
        self._rows_missing += max(low, wanted) - wanted
        return low

    def ensure(
        self, int32_t slot, int32_t start, int32_t end, const int32_t[::1] pages not None
    ):
        """Map positions start .. end - 1 of a request, which has a row in the step being planned.

        `start`: its committed length as far as that is known; what is below its window is left
        out. Call it for each row of a step, with start == end for one that writes nothing.

        Returns how many pages could not be had. Their positions are the sink's, whatever comes to
        be free later, and `low` is beyond them, so that the view never reads them. The newest
        positions are served first.
        """
        cdef Window *window = self._opened(slot)
        cdef int64_t at, column, first, last, failed = self._failures
        if not 0 <= start <= end:
            raise ValueError(f"start is {start} and end {end}: give 0 <= start <= end")
        at = max(start, window.floor)
        if at < end:
            self._require_columns(pages, at, end, "end")
            self._require_follows(window, slot, at, end, pages)
        if start > window.end:
            window.low = max(window.low, start)
        if at < end:
            if at // self._page_size > window.first + window.count:
                self._drop_below(window, at // self._page_size)
            last = pages_for(end, self._page_size) - 1
            for column in range(window.first + window.count, last + 1):
                self._append(window, pages[column])
            for column in range(last, at // self._page_size - 1, -1):
                first = column * self._page_size
                window.low = <int32_t>max(
                    <int64_t>window.low,
                    self._write(
                        window, <int32_t>column, max(at, first),
                        min(<int64_t>end, first + self._page_size), start,
                    ),
                )
            self._drop_below(window, min(at, <int64_t>window.low) // self._page_size)
        window.end = max(window.end, end)
        window.last_step = self._step
        return self._failures - failed

    def ensure_verify(
        self,
        RequestTable table not None,
        const int32_t[::1] slots not None,
        const int32_t[::1] caps not None,
    ):
        """`slide` and `ensure` for the newest verify rows of these slots, int32 [n], of `table`.

        `caps` int32 [n]: their query tokens, at most. Returns how many drafts they have together,
        and how many of them belong to rows that do not have all of their window.
        """
        cdef Py_ssize_t i
        cdef int64_t drafts = 0, short = 0
        cdef Entry *entry
        cdef Window *window
        if caps.shape[0] != slots.shape[0]:
            raise ValueError(f"{caps.shape[0]} caps for {slots.shape[0]} slots")
        for i in range(slots.shape[0]):
            entry = table._entry(slots[i])
            window = self._opened(slots[i])
            self._slide(window, entry.begin)
            self.ensure(slots[i], entry.begin, entry.end, <int32_t[:entry.held]>entry.pages)
            drafts += caps[i] - 1
            if window.low > self._window_start(entry.begin):
                short += caps[i] - 1
        return drafts, short

    def take_changes(self):
        """Target pages that have had another draft page, or none, since the last call, int32 [n],
        and what they have now, int32 [n]. In the order in which they changed first.
        """
        cdef int32_t i
        pages, drafts = np.empty((2, self._changed_count), np.int32)
        cdef int32_t[::1] page_view = pages
        cdef int32_t[::1] draft_view = drafts
        for i in range(self._changed_count):
            page_view[i] = self._changed[i]
            draft_view[i] = self._map[self._changed[i]]
            self._is_changed[self._changed[i]] = 0
        self._changed_count = 0
        return pages, drafts

    def slide(self, int32_t slot, int32_t length):
        """No step planned from now on reads what is more than a window below `length`.

        `length`: committed tokens as far as that is known; for a prompt the tokens it will have,
        told before its first chunk, so that only its last window is ever mapped.
        """
        cdef Window *window = self._opened(slot)
        if length < 0:
            raise ValueError(f"length is {length}: it cannot be negative")
        self._slide(window, length)

    def release(self, int32_t slot):
        """Stop tracking a request; returns how many draft pages that sets free, now or later.

        Nothing happens for a slot without one.
        """
        cdef Window *window = self._entry(slot)
        cdef int32_t live = self._live
        if not window.open:
            return 0
        self._cut(window, window.first)
        window.open = False
        return live - self._live

    def on_target_free(self, const int32_t[::1] pages not None):
        """Target pages (int32 [n]) are given back: an evicted one, a tail, all of a request.

        Requests that still have one in their window lose it with all that follows. Returns how
        many draft pages that sets free; nothing happens for pages without readers.
        """
        cdef Py_ssize_t i
        cdef int32_t slot, column, live = self._live
        cdef bint read = False
        cdef Window *window
        for i in range(pages.shape[0]):
            if not 0 < pages[i] <= self._target_pages:
                raise ValueError(f"pages[{i}] is {pages[i]}, outside 1..{self._target_pages}")
        for i in range(pages.shape[0]):
            self._freed[pages[i]] = 1
            read = read or self._readers[pages[i]] > 0
        for slot in range(self._max_slots if read else 0):
            window = &self._windows[slot]
            for column in range(window.first, window.first + window.count):
                if self._freed[window.pages[column - window.first]]:
                    self._cut(window, column)
                    break
        for i in range(pages.shape[0]):
            self._freed[pages[i]] = 0
        return live - self._live

    def reset(self):
        """Forget every request; all pages are free. The counts of `stats` go on.

        Raises RuntimeError, changing nothing, while a step is in flight.
        """
        cdef int32_t slot, page
        if self._done < self._step:
            raise RuntimeError(f"cannot reset: step {self._step} is in flight; end it first")
        for slot in range(self._max_slots):
            self._windows[slot].open = False
            self._windows[slot].count = 0
        for page in range(1, self._target_pages + 1):
            if self._map[page]:
                self._set(page, 0)
        memset(self._readers, 0, (self._target_pages + 1) * sizeof(int32_t))
        memset(self._pages, 0, self._pool_pages * sizeof(DraftPage))
        self._deferred_count = 0
        self._live = 0
        self._pool.reset()

    def check(self):
        """Raise AssertionError that names the invariant which fails. O(pages)."""
        cdef int32_t page, slot
        readers = [0] * (self._target_pages + 1)
        self._check_pool()
        for page in range(self._target_pages + 1):
            if self._map[page] and (
                not 0 < self._map[page] < self._pool_pages
                or self._pages[self._map[page]].owner != page
            ):
                raise AssertionError(f"I1: target page {page} maps to {self._map[page]}, not its")
        for slot in range(self._max_slots):
            if self._windows[slot].open:
                self._check_window(slot, &self._windows[slot], readers)
            elif self._windows[slot].count:
                raise AssertionError(f"I5: slot {slot} is not attached but reads pages")
        for page in range(self._target_pages + 1):
            if self._readers[page] != readers[page]:
                raise AssertionError(
                    f"I5: target page {page} counts {self._readers[page]} readers of "
                    f"{readers[page]}"
                )
            if self._map[page] and not readers[page]:
                raise AssertionError(f"I5: target page {page} has a draft page but no reader")

    cdef int _check_pool(self) except -1:
        cdef int32_t i, page, owned = 0
        deferred = [0] * self._pool_pages
        for i in range(self._deferred_count):
            deferred[self._deferred[i]] += 1
        if self._pool._is_free[0] or self._pages[0].owner or deferred[0] or self._map[0]:
            raise AssertionError("I4: the sink page 0 is free or owned")
        try:
            self._pool.check()
        except AssertionError as error:
            raise AssertionError(f"I2: {error}") from None
        for page in range(1, self._pool_pages):
            unused = self._pool._is_free[page]
            if unused + deferred[page] + (self._pages[page].owner != 0) != 1:
                raise AssertionError(
                    f"I2: draft page {page} is {'' if unused else 'not '}free, held back "
                    f"{deferred[page]} times, and owned by target page {self._pages[page].owner}"
                )
            if self._pages[page].owner and self._map[self._pages[page].owner] != page:
                raise AssertionError(
                    f"I1: draft page {page} is owned by target page {self._pages[page].owner}, "
                    f"which maps to {self._map[self._pages[page].owner]}"
                )
            owned += self._pages[page].owner != 0
            if not self._pages[page].owner:
                if unused and self._pages[page].last_step > self._done:
                    raise AssertionError(
                        f"I6: draft page {page} is free while step "
                        f"{self._pages[page].last_step} may read it"
                    )
                if not unused and self._pages[page].last_step <= self._done:
                    raise AssertionError(f"I6: draft page {page} is held back without a step")
        if owned != self._live:
            raise AssertionError(f"I5: {self._live} draft pages are counted live, {owned} are")
        return 0

    cdef int _check_window(self, int32_t slot, Window *window, list readers) except -1:
        cdef int32_t column, target, size = self._page_size
        cdef int64_t first, start, end, low = max(window.low, window.floor)
        cdef DraftPage *page
        for column in range(window.first, window.first + window.count):
            target = window.pages[column - window.first]
            readers[target] += 1
            first = <int64_t>column * size
            start = max(first, low)
            end = min(<int64_t>window.end, first + size)
            if start >= end:
                continue
            if self._map[target] == 0:
                raise AssertionError(
                    f"I3: slot {slot} has no draft page for positions {start}..{end}"
                )
            page = &self._pages[self._map[target]]
            if first + page.begin > start or first + page.until < end:
                raise AssertionError(
                    f"I7: slot {slot} reads positions {start}..{end} of a page that was written "
                    f"from {first + page.begin} to {first + page.until}"
                )
        if low < window.end and not (
            window.first * <int64_t>size <= low
            and window.end <= (window.first + window.count) * <int64_t>size
        ):
            raise AssertionError(
                f"I3: slot {slot} should read {low}..{window.end} and has {window.count} pages "
                f"from {window.first * size} on"
            )
        return 0

    def corrupt_for_test(self, str kind):
        """Damage the state so that a test can see `check` notice, each kind by another invariant.

        Needs slot 0 attached with two mapped pages, a page held back and a free one. Kinds:
        "alias", "lost", "listed", "unmapped", "short", "sink", "readers", "live", "early", "late",
        "begin", "until".
        """
        cdef Window *window = &self._windows[0]
        cdef int32_t target, draft
        if not window.open or window.count < 2 or not self._deferred_count or not self._pool._top:
            raise ValueError("corrupt_for_test needs a window, a page held back and a free one")
        target = window.pages[window.count - 1]
        draft = self._map[target]
        if kind == "alias":
            self._map[target] = self._map[window.pages[0]]
        elif kind == "lost":
            self._deferred_count -= 1
        elif kind == "listed":
            self._pool.give(self._deferred[0])
        elif kind == "unmapped":
            self._map[target] = 0
            self._pages[draft].owner = 0
            self._live -= 1
            self._pool.give(draft)
        elif kind == "short":
            window.count -= 1
            self._readers[target] -= 1
            self._map[target] = 0
            self._pages[draft].owner = 0
            self._live -= 1
            self._pool.give(draft)
        elif kind == "sink":
            self._pool._is_free[0] = 1
        elif kind == "readers":
            self._readers[target] += 1
        elif kind == "live":
            self._live += 1
        elif kind == "early":
            self._deferred_count -= 1
            self._pool.give(self._deferred[self._deferred_count])
        elif kind == "late":
            self._pages[self._deferred[0]].last_step = self._done
        elif kind == "begin":
            self._pages[draft].begin = self._pages[draft].until
        elif kind == "until":
            self._pages[draft].until = 0
        else:
            raise ValueError(f"unknown kind of damage {kind!r}")
