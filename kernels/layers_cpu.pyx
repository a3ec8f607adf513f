# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""A stack of decoder layers and what a pass of theirs needs; see layers_cpu.pyi."""

from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t
from libc.stdlib cimport free

from .attention_cpu cimport RaggedBatch
from .cpu_types cimport PANEL, cpu_allocate, decoder_cache, decoder_layer, softmax_state
from .matrices_cpu cimport PackedMatrix, check_matrix, check_size, optional_norm
from .native_cpu cimport isa_of


cdef class Layers:
    """Layers, the memory that a pass of theirs works in, and the checks in front of a pass."""

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

    cdef RaggedBatch prepare(
        self, const int64_t[::1] input_ids, const int64_t[::1] positions,
        const int64_t[::1] kv_slots, const int32_t[::1] cu_q, const int32_t[::1] kv_lens,
        const int32_t[:, ::1] page_table, const int64_t[::1] tree_bits,
        const uint8_t[::1] is_tree, float[:, :, :, :, ::1] kv, int64_t page_size,
        const float[:, ::1] cos, const float[:, ::1] sin, decoder_cache *cache,
    ):
        """The batch of a pass, checked, with memory for it and its ``cache``."""
        cdef RaggedBatch batch
        if self.busy:
            raise RuntimeError("the layers run one pass at a time")
        if None in self.layer_arrays:
            raise RuntimeError("set_layer comes first")
        self.check_cache(kv, cos, sin, cache)
        batch = RaggedBatch.make(positions, cu_q, kv_lens, page_table, tree_bits, is_tree,
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
