# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""The CPU kernels of every instruction set, compiled once; see native_cpu.pyi."""

from time import perf_counter

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free

from .cpu_types cimport (
    attention_args, cpu_allocate, decoder_cache, decoder_model, decoder_scratch, draft_chain,
    packed_matrix, ragged_batch,
)

cdef extern from "cpu_kernels.h" nogil:
    int cpu_best_isa()
    void cpu_matmul(int, const packed_matrix *, const float *, int64_t, int64_t, float *, int64_t,
                    int)
    void cpu_rms_norm(int, const float *, const float *, int64_t, int64_t, float, float *)
    float cpu_multiply_adds(int, int64_t)
    float cpu_read(int, const float *, int64_t)
    void cpu_attention(int, const attention_args *, const ragged_batch *, const int32_t *)
    void cpu_decoder_forward(int, const decoder_model *, const ragged_batch *,
                             const decoder_cache *, const decoder_scratch *, const int64_t *,
                             int64_t, float *, float *)
    void cpu_draft_forward(int, const decoder_model *, const ragged_batch *, const ragged_batch *,
                           const decoder_cache *, const decoder_scratch *, const float *, float *,
                           float *)

cdef extern from "cpu_draft_chain.h" nogil:
    int cpu_draft_chain(int, const decoder_model *, const draft_chain *, const decoder_cache *,
                        decoder_scratch *)

cdef tuple ISA_NAMES = ("base", "avx2", "avx512")


def instruction_sets():
    """The instruction sets whose code can run here, the best first."""
    return ISA_NAMES[cpu_best_isa()::-1]


cdef int isa_of(name) except -1:
    """The number of an instruction set, None being the best."""
    if name is None:
        return cpu_best_isa()
    if name not in ISA_NAMES[:cpu_best_isa() + 1]:
        raise ValueError(f"isa: {name!r} is not one of {instruction_sets()}")
    return ISA_NAMES.index(name)


def measure_multiply_add_rate():
    """Operations per second, two for each lane of a multiply-add."""
    cdef int64_t repeats = 20000
    cdef double begin = perf_counter()
    cpu_multiply_adds(cpu_best_isa(), repeats)
    return repeats * 12 * 16 / (perf_counter() - begin)


def measure_stream_bandwidth(int64_t num_bytes):
    """Bytes per second of one pass over a block of ``num_bytes``."""
    cdef int64_t size = max(num_bytes // 128, 1) * 32
    cdef float *data = <float *>cpu_allocate(size * sizeof(float))
    cdef double begin
    if data == NULL:
        raise MemoryError(f"no memory for {num_bytes} bytes")
    cpu_read(cpu_best_isa(), data, size)
    begin = perf_counter()
    cpu_read(cpu_best_isa(), data, size)
    begin = perf_counter() - begin
    free(data)
    return size * sizeof(float) / begin


cdef void matmul(int isa, const packed_matrix *matrix, const float *x, int64_t ldx, int64_t rows,
                 float *out, int64_t ldo, int epilogue) noexcept nogil:
    cpu_matmul(isa, matrix, x, ldx, rows, out, ldo, epilogue)


cdef void norm_rows(int isa, const float *x, const float *weight, int64_t rows, int64_t size,
                    float eps, float *out) noexcept nogil:
    cpu_rms_norm(isa, x, weight, rows, size, eps, out)


cdef void attend(int isa, const attention_args *args, const ragged_batch *batch,
                 const int32_t *slots) noexcept nogil:
    cpu_attention(isa, args, batch, slots)


cdef void run_decoder(int isa, const decoder_model *model, const ragged_batch *batch,
                      const decoder_cache *cache, const decoder_scratch *scratch,
                      const int64_t *capture, int64_t num_capture, float *captured,
                      float *hidden) noexcept nogil:
    cpu_decoder_forward(isa, model, batch, cache, scratch, capture, num_capture, captured, hidden)


cdef void run_draft(int isa, const decoder_model *model, const ragged_batch *batch,
                    const ragged_batch *asked, const decoder_cache *cache,
                    const decoder_scratch *scratch, const float *hidden, float *recurrent,
                    float *head_input) noexcept nogil:
    cpu_draft_forward(isa, model, batch, asked, cache, scratch, hidden, recurrent, head_input)


cdef int run_chain(int isa, const decoder_model *model, const draft_chain *chain,
                   const decoder_cache *cache, decoder_scratch *scratch) noexcept nogil:
    return cpu_draft_chain(isa, model, chain, cache, scratch)
