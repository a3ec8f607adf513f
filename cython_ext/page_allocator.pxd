from libc.stdint cimport int32_t, uint8_t

cdef class PageAllocator:
    cdef int32_t _num_pages
    cdef int32_t _top
    cdef int32_t *_stack
    cdef uint8_t *_is_free

    cdef int take(self) noexcept nogil
    cdef bint give(self, int32_t page) noexcept nogil
    cdef void _fill(self) noexcept nogil
    cdef bint _is_taken(self, int32_t page) noexcept nogil
