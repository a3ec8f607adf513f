# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""The layers of a draft and its passes; see draft_cpu.pyi."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from .attention_cpu cimport RaggedBatch
from .cpu_types cimport decoder_cache, ragged_batch
from .layers_cpu cimport Layers
from .matrices_cpu cimport PackedMatrix, check_matrix, check_rows, optional_norm
from .native_cpu cimport run_draft


@cython.final
cdef class CpuDraft(Layers):
    """The layers of a draft; see draft_cpu.pyi."""

    def set_ends(self, *, embed, PackedMatrix fuse, final_norm):
        """Install what stands around the layers."""
        self.release()
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
        cdef RaggedBatch batch
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
            run_draft(self.isa, &self.c, &batch.c, &last, &cache, &self.scratch,
                      &hidden[0, 0], stream_out, normed_out)
        self.busy = False
