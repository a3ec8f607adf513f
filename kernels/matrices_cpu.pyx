# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Packed weights, and what is done with one matrix or norm alone; see matrices_cpu.pyi."""

cimport cython
from libc.stdint cimport int8_t, int64_t, uint16_t
from libc.stdlib cimport free

from .cpu_types cimport (
    EPILOGUE_STORE, PANEL, WEIGHTS_BF16, WEIGHTS_F32, WEIGHTS_I8, cpu_allocate, cpu_pack_bf16,
    cpu_pack_f32, cpu_pack_i8, cpu_source_row, cpu_weight_bytes,
)
from .native_cpu cimport isa_of, matmul, norm_rows


@cython.final
cdef class Arena:
    """One block of memory from which matrices are cut."""

    def __init__(self, int64_t num_bytes):
        if num_bytes < 1:
            raise ValueError(f"num_bytes: must be at least 1, is {num_bytes}")
        self.memory = <char *>cpu_allocate(num_bytes)
        if self.memory == NULL:
            raise MemoryError(f"no memory for {num_bytes} bytes of weights")
        self.size = num_bytes

    def __dealloc__(self):
        free(self.memory)

    cdef void *take(self, size_t num_bytes) noexcept:
        cdef size_t rounded = (num_bytes + 63) // 64 * 64
        if self.memory == NULL or self.used + rounded > self.size:
            return NULL
        self.used += rounded
        return self.memory + self.used - rounded


@cython.final
cdef class PackedMatrix:
    """A weight matrix in the layout of the matmul kernel."""

    def __init__(self, weight, bias=None, *, bint pairs=False, Arena arena=None, bint int8=False):
        cdef const uint16_t[:, ::1] half
        cdef const float[:, ::1] single
        cdef const void *source
        cdef bint is_float32 = weight.dtype.itemsize == 4
        cdef size_t num_bytes
        cdef void *memory = NULL
        if self.c.data != NULL:
            raise RuntimeError("a PackedMatrix is packed once")
        self.is_pairs = pairs
        self.c.type = WEIGHTS_I8 if int8 else WEIGHTS_F32 if is_float32 else WEIGHTS_BF16
        if is_float32:
            single = weight
            self.c.n, self.c.k = single.shape[0], single.shape[1]
        else:
            half = weight
            self.c.n, self.c.k = half.shape[0], half.shape[1]
        if self.c.n < 1 or self.c.k < 1 or (pairs and self.c.n % 2):
            raise ValueError(f"weight: cannot pack the shape {weight.shape} (pairs={pairs})")
        self.c.panels = (self.c.n // 2 + 7) // 8 if pairs else (self.c.n + PANEL - 1) // PANEL
        source = <const void *>&single[0, 0] if is_float32 else <const void *>&half[0, 0]
        num_bytes = self.c.panels * PANEL * self.c.k * cpu_weight_bytes(self.c.type)
        if arena is not None:
            memory = arena.take(num_bytes)
        if memory != NULL:
            self.arena = arena
        else:
            memory = self.owned = cpu_allocate(num_bytes)
        if memory == NULL:
            raise MemoryError(f"no memory for {num_bytes} bytes of weights")
        self.c.data = memory
        if int8:
            self.owned_scales = <float *>cpu_allocate(self.c.panels * PANEL * sizeof(float))
            if self.owned_scales == NULL:
                raise MemoryError("no memory for the scales of a matrix")
            self.c.scales = self.owned_scales
            cpu_pack_i8(source, is_float32, self.c.n, self.c.k, self.c.panels, pairs,
                        <int8_t *>memory, self.owned_scales)
        elif is_float32:
            cpu_pack_f32(<const float *>source, self.c.n, self.c.k, self.c.panels, pairs,
                         <float *>memory)
        else:
            cpu_pack_bf16(<const uint16_t *>source, self.c.n, self.c.k, self.c.panels, pairs,
                          <uint16_t *>memory)
        if bias is not None:
            self.pack_bias(bias)

    cdef int pack_bias(self, const float[::1] bias) except -1:
        cdef int64_t panel, column, row
        if bias.shape[0] != self.c.n:
            raise ValueError(f"bias: has {bias.shape[0]} elements for {self.c.n} outputs")
        self.owned_bias = <float *>cpu_allocate(self.c.panels * PANEL * sizeof(float))
        if self.owned_bias == NULL:
            raise MemoryError("no memory for a bias")
        for panel in range(self.c.panels):
            for column in range(PANEL):
                row = cpu_source_row(self.c.n, self.is_pairs, panel, column)
                if row >= 0:
                    self.owned_bias[panel * PANEL + column] = bias[row]
        self.c.bias = self.owned_bias
        return 0

    def __dealloc__(self):
        free(self.owned)
        free(self.owned_bias)
        free(self.owned_scales)

    @property
    def shape(self):
        """(outputs, inputs)."""
        return (self.c.n, self.c.k)

    @property
    def nbytes(self):
        """Bytes of the packed weights."""
        return self.c.panels * PANEL * self.c.k * cpu_weight_bytes(self.c.type)


cdef int check_matrix(PackedMatrix matrix, str name, int64_t n, int64_t k,
                      bint pairs) except -1:
    if matrix.c.n != n or matrix.c.k != k or matrix.is_pairs != pairs:
        raise ValueError(f"{name}: has shape {matrix.shape}, expected {(n, k)} (pairs={pairs})")
    return 0


cdef int check_size(const float[::1] array, str name, int64_t size) except -1:
    if array.shape[0] != size:
        raise ValueError(f"{name}: has {array.shape[0]} elements, expected {size}")
    return 0


cdef int check_rows(const float[:, ::1] array, str name, int64_t rows, int64_t width) except -1:
    if array.shape[0] != rows or array.shape[1] != width:
        raise ValueError(
            f"{name}: must be {(rows, width)}, is {(array.shape[0], array.shape[1])}"
        )
    return 0


cdef const float *optional_norm(array, str name, int64_t size) except? NULL:
    """The weights of a norm, kept alive by the caller; NULL for None."""
    cdef const float[::1] weights
    if array is None:
        return NULL
    weights = array
    check_size(weights, name, size)
    return &weights[0]


def linear(const float[:, ::1] x, PackedMatrix matrix, float[:, ::1] out, *, isa=None):
    """out = x W^T + bias."""
    cdef int level = isa_of(isa)
    if matrix.is_pairs or x.shape[1] != matrix.c.k or out.shape[1] != matrix.c.n:
        raise ValueError(f"x, out: widths {x.shape[1]}, {out.shape[1]} for {matrix.shape}")
    if out.shape[0] != x.shape[0]:
        raise ValueError(f"out: has {out.shape[0]} rows, x has {x.shape[0]}")
    if x.shape[0] == 0:
        return
    with nogil:
        matmul(level, &matrix.c, &x[0, 0], x.shape[1], x.shape[0],
               &out[0, 0], out.shape[1], EPILOGUE_STORE)


def rms_norm(const float[:, ::1] x, const float[::1] weight, float eps, float[:, ::1] out, *,
             isa=None):
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    cdef int level = isa_of(isa)
    check_size(weight, "weight", x.shape[1])
    if out.shape[0] != x.shape[0] or out.shape[1] != x.shape[1]:
        raise ValueError("out: must have the shape of x")
    if x.shape[0]:
        with nogil:
            norm_rows(level, &x[0, 0], &weight[0], x.shape[0],
                      x.shape[1], eps, &out[0, 0])


def rms_norm_chunks(const float[:, ::1] x, const float[:, ::1] weights, float eps,
                    float[:, ::1] out, *, isa=None):
    """rms_norm of every chunk of x's columns with a row of ``weights``."""
    cdef int level = isa_of(isa)
    cdef int64_t row, chunk, size = weights.shape[1]
    if weights.shape[0] * size != x.shape[1]:
        raise ValueError(f"weights: {weights.shape[0]} of {size} elements for {x.shape[1]} columns")
    if out.shape[0] != x.shape[0] or out.shape[1] != x.shape[1]:
        raise ValueError("out: must have the shape of x")
    with nogil:
        for row in range(x.shape[0]):
            for chunk in range(weights.shape[0]):
                norm_rows(level, &x[row, chunk * size], &weights[chunk, 0], 1, size, eps,
                          &out[row, chunk * size])
