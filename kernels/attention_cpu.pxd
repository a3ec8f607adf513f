from libc.stdint cimport int32_t, int64_t, uint8_t

from .cpu_types cimport ragged_batch

cdef enum:
    DEF_GATHERED = 128  # slots that a tree node's keys are gathered from at most

cdef class RaggedBatch:
    cdef ragged_batch c
    cdef int32_t *slots
    cdef int32_t *first
    cdef int64_t longest
    cdef object kept

    @staticmethod
    cdef RaggedBatch make(
        const int64_t[::1] positions, const int32_t[::1] cu_q, const int32_t[::1] kv_lens,
        const int32_t[:, ::1] page_table, const int64_t[::1] tree_bits,
        const uint8_t[::1] is_tree, int64_t page_size, int64_t num_slots,
    )
    cdef int trim(self, const int64_t[::1] asked, ragged_batch *last) except -1
    cdef bint list_slots(self, int64_t num_slots) noexcept nogil
    cdef int check_trees(self) except -1
