from libc.stdint cimport int32_t

cdef struct Accepted:
    int32_t *nodes
    int32_t *tokens
    bint scattered
