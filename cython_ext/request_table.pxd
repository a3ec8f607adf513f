from libc.stdint cimport int32_t, int64_t, uint8_t

from .page_allocator cimport PageAllocator

cdef enum:
    MAX_QUERY = 65  # query tokens of a verify row, at most, and one more

# One request in a slot. `length`: committed tokens, the prompt included. `target`: tokens that
# prefill computes; `filled` of them are planned. `emits`: most tokens that the newest row may
# still add, `reach`: tokens from its first on whose KV it may write; both 0 once its result is in.
# `begin`, `end`: where the tokens of the newest verify row begin at least, and end at most.
# `fast`: `commit_fast` may commit its rows; the counts since `take_counts` are those of its verify
# rows.
cdef struct Entry:
    bint open
    bint sure_length
    bint drafts
    int32_t length
    int32_t max_total
    int32_t target
    int32_t filled
    int32_t emits
    int32_t reach
    int32_t begin
    int32_t end
    int32_t held
    int32_t room
    int64_t last_step
    int32_t *pages
    bint fast
    bint stream
    int32_t num_stops
    int32_t *stops
    int32_t verify_ct
    int32_t verify_tokens
    int32_t correct
    int32_t proposed
    int32_t plain_ct
    uint8_t reason
    int32_t histogram[MAX_QUERY]

cdef class _Ints:
    cdef int32_t *data
    cdef Py_ssize_t size
    cdef Py_ssize_t room

    cdef int push(self, int32_t value) except -1
    cdef bytes take(self)

cdef class RequestTable:
    cdef int32_t _max_slots
    cdef int32_t _page_size
    cdef int32_t _draft_reach
    cdef Entry *_entries
    cdef list _rids
    cdef list _sinks
    cdef list _tokens
    cdef _Ints _slots
    cdef _Ints _q_caps
    cdef _Ints _page_slots
    cdef _Ints _page_indexes
    cdef _Ints _page_ids

    cdef Entry *_entry(self, int64_t slot) except NULL
    cdef int _append_page(self, Entry *entry, int32_t page) except -1
    cdef int32_t _width(self, Entry *entry, int32_t cap) noexcept nogil
    cdef bint _is_plain(
        self, Entry *entry, const int32_t *run, int32_t length
    ) noexcept nogil
    cdef void _clear_counts(self, Entry *entry) noexcept nogil
    cdef int32_t _reach(self, int32_t width) noexcept nogil
    cdef int32_t _lacks(self, Entry *entry, int32_t width) noexcept nogil
