# cython: cdivision=True
from libc.stdint cimport int32_t, int64_t

cdef enum Fault:
    NONE = 0
    SLOT = 1
    NEGATIVE_LENGTH = 2
    NEGATIVE_START = 3
    TABLE_WIDTH = 4
    NO_PAGE = 5
    PARENT = 6
    WIDE_TREE = 7
    CU_ORDER = 8
    FIRST_ACCEPT = 9
    ACCEPT_ORDER = 10

cdef struct Report:
    Fault fault
    Py_ssize_t row
    int64_t item
    int64_t value

# KV slot of a sequence index under one page table row; -1 where no page is mapped.
cdef inline int64_t kv_slot_of(
    const int32_t *pages, int64_t index, int64_t page_size
) noexcept nogil:
    cdef int32_t page = pages[index // page_size]
    return page * page_size + index % page_size if page > 0 else -1
