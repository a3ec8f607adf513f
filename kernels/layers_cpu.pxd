from libc.stdint cimport int32_t, int64_t, uint8_t

from .attention_cpu cimport DEF_GATHERED, RaggedBatch
from .cpu_types cimport decoder_cache, decoder_model, decoder_scratch

cdef class Layers:
    cdef decoder_model c
    cdef decoder_scratch scratch
    cdef int32_t gathered[DEF_GATHERED]
    cdef int64_t capacity
    cdef int isa
    cdef bint busy
    cdef list layer_arrays
    cdef object embed_array
    cdef int64_t vocabulary

    cdef void release(self) noexcept
    cdef int reserve(self, int64_t tokens) except -1
    cdef bint fused(self) noexcept
    cdef int set_embed(self, embed) except -1
    cdef RaggedBatch prepare(
        self, const int64_t[::1] input_ids, const int64_t[::1] positions,
        const int64_t[::1] kv_slots, const int32_t[::1] cu_q, const int32_t[::1] kv_lens,
        const int32_t[:, ::1] page_table, const int64_t[::1] tree_bits,
        const uint8_t[::1] is_tree, float[:, :, :, :, ::1] kv, int64_t page_size,
        const float[:, ::1] cos, const float[:, ::1] sin, decoder_cache *cache,
    )
    cdef int check_cache(self, float[:, :, :, :, ::1] kv, const float[:, ::1] cos,
                         const float[:, ::1] sin, decoder_cache *cache) except -1
    cdef int check_tokens(self, const int64_t[::1] ids, const int64_t[::1] positions,
                          const int64_t[::1] slots, int64_t num_slots,
                          int64_t num_positions) except -1
