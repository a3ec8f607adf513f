from libc.stdint cimport int64_t

from .cpu_types cimport packed_matrix

cdef class Arena:
    cdef char *memory
    cdef size_t size, used
    cdef void *take(self, size_t num_bytes) noexcept

cdef class PackedMatrix:
    cdef packed_matrix c
    cdef void *owned
    cdef float *owned_bias
    cdef float *owned_scales
    cdef Arena arena
    cdef bint is_pairs
    cdef int pack_bias(self, const float[::1] bias) except -1

cdef int check_matrix(PackedMatrix matrix, str name, int64_t n, int64_t k, bint pairs) except -1
cdef int check_size(const float[::1] array, str name, int64_t size) except -1
cdef int check_rows(const float[:, ::1] array, str name, int64_t rows, int64_t width) except -1
# The weights of a norm, kept alive by the caller; NULL for None.
cdef const float *optional_norm(array, str name, int64_t size) except? NULL
