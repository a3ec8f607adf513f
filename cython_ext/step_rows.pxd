from libc.stdint cimport int32_t, int64_t

cdef enum RowFault:
    NONE = 0
    SLOT = 1
    KIND = 2
    LENGTH = 3
    TOKENS = 4
    VOCABULARY = 5
    COUNT = 6
    PARENT = 7
    DRAFTS = 8

cdef struct RowReport:
    RowFault fault
    Py_ssize_t row
    int64_t value
    int64_t limit

cdef struct Taken:
    Py_ssize_t tokens
    Py_ssize_t nodes
    Py_ssize_t prompt
    Py_ssize_t drafts
    bint branches
