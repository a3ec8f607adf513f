from libc.stdint cimport int32_t, int64_t, uint8_t

from .page_allocator cimport PageAllocator

# A request's window. `low`: first position whose draft rows are there, up to `end`, which is where
# the positions end that `ensure` was asked for. Below `floor` no later step reads. `pages`: target
# pages of the columns `first .. first + count - 1` of the request's page-table row, each read by
# it; `last_step`: the newest step that has a row of it.
cdef struct Window:
    bint open
    int32_t low
    int32_t floor
    int32_t end
    int32_t first
    int32_t count
    int32_t room
    int64_t last_step
    int32_t *pages

# A page of the draft pool. `owner`: its target page, 0 when it has none. Rows `begin .. until - 1`
# were, or in the planned steps will be, written since it has this owner. `last_step`: the newest
# step of the requests that stopped reading it.
cdef struct DraftPage:
    int32_t owner
    int32_t begin
    int32_t until
    int64_t last_step

cdef class DraftWindowSlotMap:
    cdef int32_t _target_pages
    cdef int32_t _pool_pages
    cdef int32_t _page_size
    cdef int32_t _window
    cdef int32_t _max_slots
    cdef object _table
    cdef int32_t[::1] _map
    cdef int32_t *_readers
    cdef uint8_t *_freed
    cdef int32_t *_changed
    cdef uint8_t *_is_changed
    cdef int32_t _changed_count
    cdef DraftPage *_pages
    cdef Window *_windows
    cdef PageAllocator _pool
    cdef int32_t *_deferred
    cdef int32_t _deferred_count
    cdef int64_t _step
    cdef int64_t _done
    cdef int32_t _live
    cdef int32_t _high_water
    cdef int64_t _failures
    cdef int64_t _rows_found
    cdef int64_t _rows_missing

    cdef Window *_entry(self, int32_t slot) except NULL
    cdef Window *_opened(self, int32_t slot) except NULL
    cdef int _require_columns(
        self, const int32_t[::1] pages, int64_t start, int64_t end, str name
    ) except -1
    cdef int64_t _window_start(self, int64_t length) noexcept
    cdef int64_t _rows_from(self, int64_t position, const int32_t[::1] pages) noexcept
    cdef int _append(self, Window *window, int32_t page) except -1
    cdef void _set(self, int32_t target, int32_t draft) noexcept
    cdef void _stop_reading(self, Window *window, int32_t page) noexcept
    cdef void _drop_below(self, Window *window, int64_t column) noexcept
    cdef void _cut(self, Window *window, int64_t column) noexcept
    cdef void _slide(self, Window *window, int64_t length) noexcept
    cdef int32_t _take(self, int32_t target, int64_t begin) noexcept
    cdef int64_t _write(
        self, Window *window, int32_t column, int64_t start, int64_t end, int64_t length
    ) noexcept
    cdef int _require_follows(
        self, Window *window, int32_t slot, int64_t start, int64_t end, const int32_t[::1] pages
    ) except -1
    cdef int _check_pool(self) except -1
    cdef int _check_window(self, int32_t slot, Window *window, list readers) except -1
