# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Native float32 kernels for dense decoders on a CPU; see decoder_cpu.pyi."""

from time import perf_counter

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t
from libc.math cimport sqrt
from libc.stdlib cimport free

cdef extern from "cpu_kernels.h" nogil:
    enum:
        PANEL
        EPILOGUE_STORE
    ctypedef struct softmax_state:
        pass
    ctypedef struct packed_matrix:
        const void *data
        const float *bias
        int64_t n, k, panels
        int is_float32
    ctypedef struct decoder_layer:
        packed_matrix qkv, o, gate_up, down
        const float *input_norm
        const float *embed_norm
        const float *post_norm
        const float *q_norm
        const float *k_norm
        int64_t window
        int norm_residual
    ctypedef struct decoder_model:
        int64_t hidden, inner, heads, kv_heads, head_dim, num_layers
        float eps, scale
        decoder_layer *layers
        const float *final_norm
        packed_matrix lm_head
        packed_matrix fuse
        const void *embed
        int embed_is_float32
    ctypedef struct ragged_batch:
        int64_t num_tokens, num_rows, table_width, page_size
        const int64_t *input_ids
        const int64_t *positions
        const int64_t *kv_slots
        const int64_t *tree_bits
        const int32_t *cu_q
        const int32_t *kv_lens
        const int32_t *page_table
        const uint8_t *is_tree
    ctypedef struct attention_args:
        const float *query
        const float *keys
        const float *values
        int64_t heads, kv_heads, head_dim, window
        float scale
        float *out
        softmax_state *states
        int64_t *visible
        int32_t *gathered
    ctypedef struct decoder_scratch:
        float *stream
        float *normed
        float *qkv
        float *context
        float *gated
        float *embedded
        int32_t *slots
        int32_t *gathered
        softmax_state *states
        int64_t *visible
    ctypedef struct decoder_cache:
        float *data
        int64_t num_slots
        const float *cos
        const float *sin
    void *cpu_allocate(size_t)
    int64_t cpu_source_row(int64_t, int, int64_t, int64_t)
    void cpu_pack_bf16(const uint16_t *, int64_t, int64_t, int64_t, int, uint16_t *)
    void cpu_pack_f32(const float *, int64_t, int64_t, int64_t, int, float *)
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
    ctypedef struct draft_chain:
        int64_t rows, passes, pages, table_width, page_size
        const int32_t *slot_of
        const int32_t *caps
        const int32_t *seq_lens
        const int32_t *page_table
        const packed_matrix *head
        const int64_t *token_ids
        int norm_output
        const float *hidden
        float *recurrent
        float *normed
        float *logits
        int64_t *drafts
        int64_t *ids
        int64_t *positions
        int64_t *kv_slots
        int64_t *tree_bits
        int32_t *cu_q
        int32_t *kv_lens
        int32_t *slot_list
        uint8_t *is_tree
    int cpu_draft_chain(int, const decoder_model *, const draft_chain *, const decoder_cache *,
                        decoder_scratch *)

cdef enum:
    DEF_GATHERED = 128
cdef int64_t MAX_TREE = 64


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


@cython.final
cdef class Arena:
    """One block of memory from which matrices are cut."""

    cdef char *memory
    cdef size_t size, used

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

    cdef packed_matrix c
    cdef void *owned
    cdef float *owned_bias
    cdef Arena arena
    cdef bint is_pairs

    def __init__(self, weight, bias=None, *, bint pairs=False, Arena arena=None):
        cdef const uint16_t[:, ::1] half
        cdef const float[:, ::1] single
        cdef size_t num_bytes
        cdef void *memory = NULL
        if self.c.data != NULL:
            raise RuntimeError("a PackedMatrix is packed once")
        self.is_pairs = pairs
        self.c.is_float32 = weight.dtype.itemsize == 4
        if self.c.is_float32:
            single = weight
            self.c.n, self.c.k = single.shape[0], single.shape[1]
        else:
            half = weight
            self.c.n, self.c.k = half.shape[0], half.shape[1]
        if self.c.n < 1 or self.c.k < 1 or (pairs and self.c.n % 2):
            raise ValueError(f"weight: cannot pack the shape {weight.shape} (pairs={pairs})")
        self.c.panels = (self.c.n // 2 + 7) // 8 if pairs else (self.c.n + PANEL - 1) // PANEL
        num_bytes = self.c.panels * PANEL * self.c.k * (4 if self.c.is_float32 else 2)
        if arena is not None:
            memory = arena.take(num_bytes)
        if memory != NULL:
            self.arena = arena
        else:
            memory = self.owned = cpu_allocate(num_bytes)
        if memory == NULL:
            raise MemoryError(f"no memory for {num_bytes} bytes of weights")
        self.c.data = memory
        if self.c.is_float32:
            cpu_pack_f32(&single[0, 0], self.c.n, self.c.k, self.c.panels, pairs, <float *>memory)
        else:
            cpu_pack_bf16(&half[0, 0], self.c.n, self.c.k, self.c.panels, pairs,
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

    @property
    def shape(self):
        """(outputs, inputs)."""
        return (self.c.n, self.c.k)

    @property
    def nbytes(self):
        """Bytes of the packed weights."""
        return self.c.panels * PANEL * self.c.k * (4 if self.c.is_float32 else 2)


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
        cpu_matmul(level, &matrix.c, &x[0, 0], x.shape[1], x.shape[0],
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
            cpu_rms_norm(level, &x[0, 0], &weight[0], x.shape[0],
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
                cpu_rms_norm(level, &x[row, chunk * size], &weights[chunk, 0], 1, size, eps,
                             &out[row, chunk * size])


@cython.final
cdef class _RaggedBatch:
    """The arrays of a batch, checked against the cache they address."""

    cdef ragged_batch c
    cdef int32_t *slots
    cdef int32_t *first
    cdef int64_t longest
    cdef object kept

    def __dealloc__(self):
        free(self.slots)
        free(self.first)

    @staticmethod
    cdef _RaggedBatch make(
        const int64_t[::1] positions, const int32_t[::1] cu_q, const int32_t[::1] kv_lens,
        const int32_t[:, ::1] page_table, const int64_t[::1] tree_bits,
        const uint8_t[::1] is_tree, int64_t page_size, int64_t num_slots,
    ):
        cdef _RaggedBatch self = _RaggedBatch.__new__(_RaggedBatch)
        cdef int64_t tokens = positions.shape[0], rows = kv_lens.shape[0]
        cdef int64_t row, total = 0, length
        self.kept = (positions, cu_q, kv_lens, page_table, tree_bits, is_tree)
        if tokens < 1 or rows < 1 or page_size < 1:
            raise ValueError("positions, kv_lens, page_size: a batch needs a token and a page")
        if tree_bits.shape[0] != tokens:
            raise ValueError(f"tree_bits: has {tree_bits.shape[0]} elements for {tokens} tokens")
        if cu_q.shape[0] != rows + 1 or is_tree.shape[0] != rows or page_table.shape[0] != rows:
            raise ValueError("cu_q, kv_lens, page_table, is_tree: do not agree on the rows")
        if cu_q[0] != 0 or cu_q[rows] != tokens:
            raise ValueError(f"cu_q: must run from 0 to the {tokens} tokens")
        for row in range(rows):
            length = cu_q[row + 1] - cu_q[row]
            if length < 0 or kv_lens[row] < length:
                raise ValueError(f"kv_lens: row {row} has {kv_lens[row]} for {length} queries")
            if is_tree[row] and length > MAX_TREE:
                raise ValueError(f"is_tree: row {row} has {length} nodes, at most {MAX_TREE}")
            if kv_lens[row] > page_table.shape[1] * page_size:
                raise ValueError(f"page_table: too narrow for {kv_lens[row]} tokens of row {row}")
            total += kv_lens[row]
            self.longest = max(self.longest, length)
        self.c.num_tokens, self.c.num_rows = tokens, rows
        self.c.table_width, self.c.page_size = page_table.shape[1], page_size
        self.c.positions, self.c.tree_bits = &positions[0], &tree_bits[0]
        self.c.cu_q, self.c.kv_lens, self.c.is_tree = &cu_q[0], &kv_lens[0], &is_tree[0]
        self.c.page_table = &page_table[0, 0] if page_table.shape[1] else NULL
        self.slots = <int32_t *>cpu_allocate(max(total, 1) * sizeof(int32_t))
        if self.slots == NULL:
            raise MemoryError("no memory for the slot lists")
        if not self.list_slots(num_slots):
            raise ValueError("page_table: names a page outside the cache")
        self.check_trees()
        return self

    cdef int trim(self, const int64_t[::1] asked, ragged_batch *last) except -1:
        """The rows from their first token in ``asked`` on; whole ones if there are trees."""
        cdef int64_t row, i, rows = self.c.num_rows, out = 0
        last[0] = self.c
        for row in range(rows):
            if self.c.is_tree[row]:
                return 0
        self.first = <int32_t *>cpu_allocate((2 * rows + 1) * sizeof(int32_t))
        if self.first == NULL:
            raise MemoryError("no memory for the rows' tokens")
        for row in range(rows):
            self.first[row] = self.c.cu_q[row + 1]
        row = 0
        for i in range(asked.shape[0]):
            if not 0 <= asked[i] < self.c.num_tokens:
                raise ValueError(f"asked: there is no token {asked[i]}")
            while row and self.c.cu_q[row] > asked[i]:
                row -= 1
            while self.c.cu_q[row + 1] <= asked[i]:
                row += 1
            self.first[row] = min(self.first[row], <int32_t>asked[i])
        for row in range(rows):
            out += self.c.cu_q[row + 1] - self.first[row]
            self.first[rows + row + 1] = <int32_t>out
        self.first[rows] = 0
        last.cu_q, last.num_tokens = self.first + rows, out
        return 0

    cdef bint list_slots(self, int64_t num_slots) noexcept nogil:
        cdef int64_t row, index, page, offset, base, out = 0
        cdef int64_t num_pages = num_slots // self.c.page_size
        cdef const int32_t *pages
        for row in range(self.c.num_rows):
            pages = self.c.page_table + row * self.c.table_width
            index = page = 0
            while index < self.c.kv_lens[row]:
                if pages[page] < 0 or pages[page] >= num_pages:
                    return False
                base = pages[page] * self.c.page_size
                for offset in range(min(self.c.page_size, self.c.kv_lens[row] - index)):
                    self.slots[out] = <int32_t>(base + offset)
                    out += 1
                index += self.c.page_size
                page += 1
        return True

    cdef int check_trees(self) except -1:
        # A node sees itself and nothing after itself; that also bounds the gathered keys.
        cdef int64_t row, node, bits
        for row in range(self.c.num_rows):
            if not self.c.is_tree[row]:
                continue
            for node in range(self.c.cu_q[row + 1] - self.c.cu_q[row]):
                bits = self.c.tree_bits[self.c.cu_q[row] + node]
                if not (bits >> node) & 1 or (node < 63 and bits >> (node + 1)):
                    raise ValueError(
                        f"tree_bits: node {node} of row {row} must see itself and only nodes "
                        "before it"
                    )
        return 0


def paged_attention(
    const float[:, :, ::1] query, const float[:, :, ::1] key_cache,
    const float[:, :, ::1] value_cache, const int64_t[::1] positions, const int32_t[::1] cu_q,
    const int32_t[::1] kv_lens, const int32_t[:, ::1] page_table, const int64_t[::1] tree_bits,
    const uint8_t[::1] is_tree, int64_t page_size, float scale, int64_t window,
    float[:, :, ::1] out, *, isa=None,
):
    """The native twin of kernels.paged_attention."""
    cdef _RaggedBatch batch = _RaggedBatch.make(
        positions, cu_q, kv_lens, page_table, tree_bits, is_tree, page_size, key_cache.shape[0]
    )
    cdef attention_args args
    cdef int level = isa_of(isa)
    cdef int32_t gathered[DEF_GATHERED]
    cdef int64_t heads = query.shape[1], kv_heads = key_cache.shape[1], dim = query.shape[2]
    if query.shape[0] != batch.c.num_tokens or dim % 8 or dim != key_cache.shape[2]:
        raise ValueError("query: must be [tokens, heads, head_dim], head_dim a multiple of 8")
    if heads % kv_heads or window < 0:
        raise ValueError("query, window: heads must be a multiple of kv heads, window >= 0")
    if tuple(out.shape)[:3] != tuple(query.shape)[:3]:
        raise ValueError("out: must have the shape of query")
    if tuple(value_cache.shape)[:3] != tuple(key_cache.shape)[:3]:
        raise ValueError("value_cache: must have the shape of key_cache")
    args.query, args.keys = &query[0, 0, 0], &key_cache[0, 0, 0]
    args.values, args.out = &value_cache[0, 0, 0], &out[0, 0, 0]
    args.heads, args.kv_heads, args.head_dim = heads, kv_heads, dim
    args.window, args.scale, args.gathered = window, scale, gathered
    args.states = <softmax_state *>cpu_allocate(
        batch.longest * heads * sizeof(softmax_state)
    )
    args.visible = <int64_t *>cpu_allocate(max(batch.longest, 1) * sizeof(int64_t))
    if args.states == NULL or args.visible == NULL:
        free(args.states)
        free(args.visible)
        raise MemoryError("no memory for the softmax states")
    with nogil:
        cpu_attention(level, &args, &batch.c, batch.slots)
    free(args.states)
    free(args.visible)


cdef class _Layers:
    """Layers, the memory that a pass of theirs works in, and the checks in front of a pass."""

    cdef decoder_model c
    cdef decoder_scratch scratch
    cdef int32_t gathered[DEF_GATHERED]
    cdef int64_t capacity
    cdef int isa
    cdef bint busy
    cdef list layer_arrays
    cdef object embed_array
    cdef int64_t vocabulary

    def __init__(self, int64_t hidden_size, int64_t intermediate_size, int64_t num_heads,
                 int64_t num_kv_heads, int64_t head_dim, int64_t num_layers, float eps, *,
                 isa=None):
        if min(hidden_size, intermediate_size, num_heads, num_kv_heads, num_layers) < 1:
            raise ValueError("hidden_size, ..., num_layers: must be at least 1")
        if head_dim < 8 or head_dim % 8 or num_heads % num_kv_heads:
            raise ValueError("head_dim, num_kv_heads: need a multiple of 8 and whole groups")
        if self.c.layers != NULL:
            raise RuntimeError("the layers are initialised once")
        self.c.hidden, self.c.inner = hidden_size, intermediate_size
        self.c.heads, self.c.kv_heads, self.c.head_dim = num_heads, num_kv_heads, head_dim
        self.c.num_layers, self.c.eps = num_layers, eps
        self.c.scale = <float>(1.0 / sqrt(<double>head_dim))
        self.c.layers = <decoder_layer *>cpu_allocate(num_layers * sizeof(decoder_layer))
        if self.c.layers == NULL:
            raise MemoryError("no memory for the layers")
        self.layer_arrays = [None] * num_layers
        self.scratch.gathered = self.gathered
        self.isa = isa_of(isa)

    def __dealloc__(self):
        self.release()
        free(self.c.layers)

    cdef void release(self) noexcept:
        free(self.scratch.stream)
        free(self.scratch.states)
        free(self.scratch.visible)
        self.scratch.stream = NULL
        self.scratch.visible = NULL
        self.scratch.states = NULL
        self.capacity = 0

    cdef int reserve(self, int64_t tokens) except -1:
        cdef int64_t q_size = self.c.heads * self.c.head_dim
        cdef int64_t qkv = self.c.layers[0].qkv.panels * PANEL
        cdef int64_t gated = self.c.layers[0].gate_up.panels * 8
        cdef int64_t streams = 2 if self.fused() else 1
        cdef int64_t wide = max(streams * self.c.hidden, q_size), sizes = 0
        if tokens <= self.capacity:
            return 0
        self.release()
        tokens = max(tokens, 64)
        sizes = tokens * (streams * self.c.hidden + wide + qkv + q_size + gated)
        self.scratch.stream = <float *>cpu_allocate(sizes * sizeof(float))
        self.scratch.states = <softmax_state *>cpu_allocate(
            tokens * self.c.heads * sizeof(softmax_state)
        )
        self.scratch.visible = <int64_t *>cpu_allocate(tokens * sizeof(int64_t))
        if not (self.scratch.stream and self.scratch.states and self.scratch.visible):
            raise MemoryError(f"no memory for a batch of {tokens} tokens")
        self.scratch.normed = self.scratch.stream + tokens * self.c.hidden
        self.scratch.qkv = self.scratch.normed + tokens * wide
        self.scratch.context = self.scratch.qkv + tokens * qkv
        self.scratch.gated = self.scratch.context + tokens * q_size
        self.scratch.embedded = self.scratch.gated + tokens * gated
        self.capacity = tokens
        return 0

    cdef bint fused(self) noexcept:
        """Whether embeddings and hidden states are joined somewhere."""
        return self.c.fuse.data != NULL or self.c.layers[0].embed_norm != NULL

    def set_layer(self, int64_t index, *, input_norm, PackedMatrix qkv, q_norm, k_norm,
                  PackedMatrix o, const float[::1] post_norm, PackedMatrix gate_up,
                  PackedMatrix down, int64_t window, embed_norm=None, bint norm_residual=False):
        """Install layer ``index``."""
        cdef decoder_layer *layer
        cdef int64_t q_size = self.c.heads * self.c.head_dim, hidden = self.c.hidden
        if not 0 <= index < self.c.num_layers or window < 0:
            raise ValueError(f"index, window: {index}, {window} are out of range")
        if embed_norm is not None and (index or input_norm is None):
            raise ValueError("embed_norm: only the first layer has one, beside an input_norm")
        check_matrix(qkv, "qkv", q_size + 2 * self.c.kv_heads * self.c.head_dim,
                     hidden if embed_norm is None else 2 * hidden, False)
        check_matrix(o, "o", hidden, q_size, False)
        check_matrix(gate_up, "gate_up", 2 * self.c.inner, hidden, True)
        check_matrix(down, "down", hidden, self.c.inner, False)
        check_size(post_norm, "post_norm", hidden)
        self.release()  # whose sizes may be other ones now
        layer = &self.c.layers[index]
        layer.qkv, layer.o, layer.gate_up, layer.down = qkv.c, o.c, gate_up.c, down.c
        layer.post_norm, layer.window = &post_norm[0], window
        layer.norm_residual = norm_residual and embed_norm is not None
        layer.input_norm = optional_norm(input_norm, "input_norm", hidden)
        layer.embed_norm = optional_norm(embed_norm, "embed_norm", hidden)
        layer.q_norm = optional_norm(q_norm, "q_norm", self.c.head_dim)
        layer.k_norm = optional_norm(k_norm, "k_norm", self.c.head_dim)
        self.layer_arrays[index] = (
            input_norm, embed_norm, post_norm, q_norm, k_norm, qkv, o, gate_up, down
        )

    cdef int set_embed(self, embed) except -1:
        cdef const uint16_t[:, ::1] half
        cdef const float[:, ::1] single
        self.c.embed_is_float32 = embed.dtype.itemsize == 4
        if self.c.embed_is_float32:
            single = embed
            self.c.embed = &single[0, 0]
        else:
            half = embed
            self.c.embed = &half[0, 0]
        if embed.shape[1] != self.c.hidden:
            raise ValueError(f"embed: has shape {embed.shape}, expected {self.c.hidden} columns")
        self.embed_array = embed
        self.vocabulary = embed.shape[0]
        return 0

    cdef _RaggedBatch prepare(
        self, const int64_t[::1] input_ids, const int64_t[::1] positions,
        const int64_t[::1] kv_slots, const int32_t[::1] cu_q, const int32_t[::1] kv_lens,
        const int32_t[:, ::1] page_table, const int64_t[::1] tree_bits,
        const uint8_t[::1] is_tree, float[:, :, :, :, ::1] kv, int64_t page_size,
        const float[:, ::1] cos, const float[:, ::1] sin, decoder_cache *cache,
    ):
        """The batch of a pass, checked, with memory for it and its ``cache``."""
        cdef _RaggedBatch batch
        if self.busy:
            raise RuntimeError("the layers run one pass at a time")
        if None in self.layer_arrays:
            raise RuntimeError("set_layer comes first")
        self.check_cache(kv, cos, sin, cache)
        batch = _RaggedBatch.make(positions, cu_q, kv_lens, page_table, tree_bits, is_tree,
                                  page_size, kv.shape[2])
        self.check_tokens(input_ids, positions, kv_slots, kv.shape[2],
                          min(cos.shape[0], sin.shape[0]))
        batch.c.input_ids, batch.c.kv_slots = &input_ids[0], &kv_slots[0]
        self.reserve(positions.shape[0])
        self.scratch.slots = batch.slots
        return batch

    cdef int check_cache(self, float[:, :, :, :, ::1] kv, const float[:, ::1] cos,
                         const float[:, ::1] sin, decoder_cache *cache) except -1:
        if (kv.shape[0] != self.c.num_layers or kv.shape[1] != 2
                or kv.shape[3] != self.c.kv_heads or kv.shape[4] != self.c.head_dim):
            raise ValueError("kv: must be [layers, 2, slots, kv heads, head_dim]")
        if cos.shape[1] * 2 != self.c.head_dim or sin.shape[1] * 2 != self.c.head_dim:
            raise ValueError("cos, sin: must be [positions, head_dim / 2]")
        cache.data, cache.num_slots = &kv[0, 0, 0, 0, 0], kv.shape[2]
        cache.cos, cache.sin = &cos[0, 0], &sin[0, 0]
        return 0

    cdef int check_tokens(self, const int64_t[::1] ids, const int64_t[::1] positions,
                          const int64_t[::1] slots, int64_t num_slots,
                          int64_t num_positions) except -1:
        cdef int64_t t
        if ids.shape[0] != positions.shape[0] or slots.shape[0] != positions.shape[0]:
            raise ValueError("input_ids, positions, kv_slots: differ in length")
        for t in range(ids.shape[0]):
            if not 0 <= ids[t] < self.vocabulary:
                raise ValueError(f"input_ids: token {ids[t]} is outside the vocabulary")
            if not 0 <= positions[t] < num_positions:
                raise ValueError(f"positions: {positions[t]} is outside the rotary table")
            if not 0 <= slots[t] < num_slots:
                raise ValueError(f"kv_slots: {slots[t]} is outside the cache")
        return 0


@cython.final
cdef class CpuDecoder(_Layers):
    """The decoder stack; see decoder_cpu.pyi."""

    cdef tuple head_arrays

    def set_head(self, *, const float[::1] final_norm, PackedMatrix lm_head, embed):
        """Install what stands around the layers; ``embed`` None means tied."""
        check_size(final_norm, "final_norm", self.c.hidden)
        check_matrix(lm_head, "lm_head", lm_head.c.n, self.c.hidden, False)
        self.c.embed = NULL
        self.vocabulary = lm_head.c.n
        if embed is not None:
            if tuple(embed.shape) != lm_head.shape:
                raise ValueError(f"embed: has shape {embed.shape}, lm_head {lm_head.shape}")
            self.set_embed(embed)
        self.c.final_norm = &final_norm[0]
        self.c.lm_head = lm_head.c
        self.head_arrays = (final_norm, lm_head)

    def forward(
        self, const int64_t[::1] input_ids, const int64_t[::1] positions,
        const int64_t[::1] kv_slots, const int32_t[::1] cu_q, const int32_t[::1] kv_lens,
        const int32_t[:, ::1] page_table, const int64_t[::1] tree_bits,
        const uint8_t[::1] is_tree, float[:, :, :, :, ::1] kv, int64_t page_size,
        const float[:, ::1] cos, const float[:, ::1] sin, const int64_t[::1] capture_layers,
        float[:, :, ::1] captured, float[:, ::1] hidden,
    ):
        """One pass through the stack."""
        cdef decoder_cache cache
        cdef _RaggedBatch batch
        cdef int64_t tokens = positions.shape[0], num_capture = capture_layers.shape[0]
        cdef float *captured_data = NULL
        cdef const int64_t *capture_data = NULL
        if self.head_arrays is None:
            raise RuntimeError("set_head comes first")
        check_rows(hidden, "hidden", tokens, self.c.hidden)
        if num_capture:
            if (captured.shape[0] != num_capture or captured.shape[1] != tokens
                    or captured.shape[2] != self.c.hidden):
                raise ValueError("captured: must be [captured layers, tokens, hidden_size]")
            captured_data, capture_data = &captured[0, 0, 0], &capture_layers[0]
        batch = self.prepare(input_ids, positions, kv_slots, cu_q, kv_lens, page_table, tree_bits,
                             is_tree, kv, page_size, cos, sin, &cache)
        self.busy = True
        with nogil:
            cpu_decoder_forward(self.isa, &self.c, &batch.c, &cache, &self.scratch,
                                capture_data, num_capture, captured_data, &hidden[0, 0])
        self.busy = False

    def logits(self, const float[:, ::1] hidden, float[:, ::1] out):
        """out = hidden W^T of the output head."""
        if self.head_arrays is None:
            raise RuntimeError("set_head comes first")
        if hidden.shape[1] != self.c.hidden or out.shape[1] != self.c.lm_head.n:
            raise ValueError("hidden, out: must be [N, hidden_size] and [N, vocabulary]")
        if hidden.shape[0] != out.shape[0]:
            raise ValueError(f"out: has {out.shape[0]} rows for {hidden.shape[0]}")
        if hidden.shape[0]:
            with nogil:
                cpu_matmul(self.isa, &self.c.lm_head, &hidden[0, 0], hidden.shape[1],
                           hidden.shape[0], &out[0, 0], out.shape[1], EPILOGUE_STORE)


@cython.final
cdef class CpuDraft(_Layers):
    """The layers of a draft; see decoder_cpu.pyi."""

    cdef tuple arrays
    cdef PackedMatrix head
    cdef const int64_t[::1] token_ids
    cdef bint norm_output

    def set_head(self, PackedMatrix head, const int64_t[::1] token_ids, bint norm_output):
        """Install what a chain needs behind the layers."""
        cdef int64_t i
        if self.arrays is None:
            raise RuntimeError("set_ends comes first")
        check_matrix(head, "head", head.c.n, self.c.hidden, False)
        if norm_output and self.c.final_norm == NULL:
            raise ValueError("norm_output: this draft has no final norm")
        if token_ids is None:
            if head.c.n > self.vocabulary:
                raise ValueError(f"head: has {head.c.n} outputs for {self.vocabulary} tokens")
        else:
            if token_ids.shape[0] != head.c.n:
                raise ValueError(f"token_ids: has {token_ids.shape[0]} ids for {head.c.n} outputs")
            for i in range(token_ids.shape[0]):
                if not 0 <= token_ids[i] < self.vocabulary:
                    raise ValueError(f"token_ids: {token_ids[i]} is outside the vocabulary")
        self.head, self.token_ids, self.norm_output = head, token_ids, norm_output

    def chain(
        self, const int32_t[::1] slots, const int32_t[::1] caps, const int32_t[::1] seq_lens,
        const int32_t[:, ::1] page_table, const int64_t[::1] ids, float[:, :, :, :, ::1] kv,
        int64_t page_size, const float[:, ::1] cos, const float[:, ::1] sin,
        const float[:, ::1] hidden, int64_t[:, ::1] drafts,
    ):
        """Passes of one token a row, each continued by its argmax."""
        cdef draft_chain c
        cdef decoder_cache cache
        cdef int64_t rows = slots.shape[0], passes = drafts.shape[0], total = 0, r, last
        cdef int64_t places = min(cos.shape[0], sin.shape[0])
        cdef int done
        cdef char *memory
        cdef char *cut
        if self.busy:
            raise RuntimeError("the layers run one pass at a time")
        if self.head is None or None in self.layer_arrays:
            raise RuntimeError("set_layer and set_head come first")
        if not rows or not passes:
            return
        if caps.shape[0] != rows or ids.shape[0] != rows or drafts.shape[1] != rows:
            raise ValueError("slots, caps, ids, drafts: do not agree on the rows")
        check_rows(hidden, "hidden", rows, self.c.hidden)
        self.check_cache(kv, cos, sin, &cache)
        if page_size < 1 or page_table.shape[1] < 1 or seq_lens.shape[0] != page_table.shape[0]:
            raise ValueError("page_table, seq_lens: do not agree on the slots")
        for r in range(rows):
            if not 0 <= slots[r] < seq_lens.shape[0]:
                raise ValueError(f"slots: {slots[r]} is outside the table")
            if not 0 <= ids[r] < self.vocabulary:
                raise ValueError(f"ids: token {ids[r]} is outside the vocabulary")
            last = seq_lens[slots[r]] + passes - 1 if caps[r] > 0 else 0
            if not 0 <= last < places or seq_lens[slots[r]] < 0:
                raise ValueError(f"seq_lens: position {last} is outside the rotary table")
            total += last + 1
        self.reserve(rows)
        cdef int64_t row_floats = 2 * self.c.hidden + self.head.c.panels * PANEL
        memory = <char *>cpu_allocate(
            rows * (row_floats * sizeof(float) + 4 * sizeof(int64_t))
            + (2 * rows + 1 + total) * sizeof(int32_t) + rows
        )
        if memory == NULL:
            raise MemoryError(f"no memory for a chain of {rows} rows")
        c.rows, c.passes, c.pages = rows, passes, kv.shape[2] // page_size
        c.table_width, c.page_size = page_table.shape[1], page_size
        c.slot_of, c.caps, c.seq_lens = &slots[0], &caps[0], &seq_lens[0]
        c.page_table, c.head = &page_table[0, 0], &self.head.c
        c.token_ids = NULL
        if self.token_ids is not None:
            c.token_ids = &self.token_ids[0]
        c.norm_output, c.hidden, c.drafts = self.norm_output, &hidden[0, 0], &drafts[0, 0]
        cut = memory
        c.ids = <int64_t *>cut
        c.positions, c.kv_slots, c.tree_bits = c.ids + rows, c.ids + 2 * rows, c.ids + 3 * rows
        c.logits = <float *>(c.ids + 4 * rows)
        c.recurrent = c.logits + rows * self.head.c.panels * PANEL
        c.normed = c.recurrent + rows * self.c.hidden
        c.kv_lens = <int32_t *>(c.normed + rows * self.c.hidden)
        c.cu_q = c.kv_lens + rows
        c.slot_list = c.cu_q + rows + 1
        c.is_tree = <uint8_t *>(c.slot_list + total)
        if self.c.final_norm == NULL:
            c.normed = NULL
        for r in range(rows):
            c.ids[r], c.cu_q[r + 1] = ids[r], <int32_t>r + 1
        self.busy = True
        with nogil:
            done = cpu_draft_chain(self.isa, &self.c, &c, &cache, &self.scratch)
        self.busy = False
        free(memory)
        if not done:
            raise ValueError("page_table: names a page outside the cache")

    def set_ends(self, *, embed, PackedMatrix fuse, final_norm):
        """Install what stands around the layers."""
        self.release()
        self.head = None
        self.c.fuse.data = NULL
        if fuse is not None:
            check_matrix(fuse, "fuse", self.c.hidden, 2 * self.c.hidden, False)
            self.c.fuse = fuse.c
        self.c.final_norm = optional_norm(final_norm, "final_norm", self.c.hidden)
        self.set_embed(embed)
        self.arrays = (fuse, final_norm)

    def forward(
        self, const int64_t[::1] input_ids, const int64_t[::1] positions,
        const int64_t[::1] kv_slots, const int32_t[::1] cu_q, const int32_t[::1] kv_lens,
        const int32_t[:, ::1] page_table, const int64_t[::1] tree_bits,
        const uint8_t[::1] is_tree, float[:, :, :, :, ::1] kv, int64_t page_size,
        const float[:, ::1] cos, const float[:, ::1] sin, const float[:, ::1] hidden,
        float[:, ::1] recurrent, float[:, ::1] head_input, const int64_t[::1] asked,
    ):
        """One pass through the layers."""
        cdef decoder_cache cache
        cdef _RaggedBatch batch
        cdef ragged_batch last
        cdef int64_t tokens = positions.shape[0]
        cdef float *stream_out = NULL
        cdef float *normed_out = NULL
        if self.arrays is None:
            raise RuntimeError("set_ends comes first")
        check_rows(hidden, "hidden", tokens, self.c.hidden)
        if recurrent is not None:
            check_rows(recurrent, "recurrent", tokens, self.c.hidden)
            stream_out = &recurrent[0, 0]
        if head_input is not None:
            check_rows(head_input, "head_input", tokens, self.c.hidden)
            if self.c.final_norm == NULL:
                raise ValueError("head_input: this draft has no final norm")
            normed_out = &head_input[0, 0]
        batch = self.prepare(input_ids, positions, kv_slots, cu_q, kv_lens, page_table, tree_bits,
                             is_tree, kv, page_size, cos, sin, &cache)
        if not self.fused():
            raise RuntimeError("set_ends needs a fuse where no layer has an embed_norm")
        batch.trim(asked, &last)
        self.busy = True
        with nogil:
            cpu_draft_forward(self.isa, &self.c, &batch.c, &last, &cache, &self.scratch,
                              &hidden[0, 0], stream_out, normed_out)
        self.busy = False
