from libc.stdint cimport int32_t, int64_t

cdef Py_ssize_t walk_row(
    const int64_t *tokens, const int32_t *parents, const int64_t *targets, Py_ssize_t width,
    int32_t *accepted, int32_t *emitted, bint *scattered
) noexcept nogil
