from libc.stdint cimport int32_t, int64_t

from .cpu_types cimport (
    attention_args, decoder_cache, decoder_model, decoder_scratch, draft_chain, packed_matrix,
    ragged_batch,
)

# The number of an instruction set, None being the best.
cdef int isa_of(name) except -1

# The kernels, for the instruction set of this number.
cdef void matmul(int isa, const packed_matrix *matrix, const float *x, int64_t ldx, int64_t rows,
                 float *out, int64_t ldo, int epilogue) noexcept nogil
cdef void norm_rows(int isa, const float *x, const float *weight, int64_t rows, int64_t size,
                    float eps, float *out) noexcept nogil
cdef void attend(int isa, const attention_args *args, const ragged_batch *batch,
                 const int32_t *slots) noexcept nogil
cdef void run_decoder(int isa, const decoder_model *model, const ragged_batch *batch,
                      const decoder_cache *cache, const decoder_scratch *scratch,
                      const int64_t *capture, int64_t num_capture, float *captured,
                      float *hidden) noexcept nogil
cdef void run_draft(int isa, const decoder_model *model, const ragged_batch *batch,
                    const ragged_batch *asked, const decoder_cache *cache,
                    const decoder_scratch *scratch, const float *hidden, float *recurrent,
                    float *head_input) noexcept nogil
# 0 if the chain leads outside the cache.
cdef int run_chain(int isa, const decoder_model *model, const draft_chain *chain,
                   const decoder_cache *cache, decoder_scratch *scratch) noexcept nogil
