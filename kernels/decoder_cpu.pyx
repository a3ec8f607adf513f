# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""A dense decoder in one native call; see decoder_cpu.pyi."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from .attention_cpu cimport RaggedBatch
from .cpu_types cimport EPILOGUE_STORE, decoder_cache
from .layers_cpu cimport Layers
from .matrices_cpu cimport PackedMatrix, check_matrix, check_rows, check_size
from .native_cpu cimport matmul, run_decoder


@cython.final
cdef class CpuDecoder(Layers):
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
        float[:, ::1] captured, float[:, ::1] hidden,
    ):
        """One pass through the stack."""
        cdef decoder_cache cache
        cdef RaggedBatch batch
        cdef int64_t tokens = positions.shape[0], num_capture = capture_layers.shape[0]
        cdef float *captured_data = NULL
        cdef const int64_t *capture_data = NULL
        if self.head_arrays is None:
            raise RuntimeError("set_head comes first")
        check_rows(hidden, "hidden", tokens, self.c.hidden)
        if num_capture:
            check_rows(captured, "captured", tokens, num_capture * self.c.hidden)
            captured_data, capture_data = &captured[0, 0], &capture_layers[0]
        batch = self.prepare(input_ids, positions, kv_slots, cu_q, kv_lens, page_table, tree_bits,
                             is_tree, kv, page_size, cos, sin, &cache)
        self.busy = True
        with nogil:
            run_decoder(self.isa, &self.c, &batch.c, &cache, &self.scratch,
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
                matmul(self.isa, &self.c.lm_head, &hidden[0, 0], hidden.shape[1],
                       hidden.shape[0], &out[0, 0], out.shape[1], EPILOGUE_STORE)
