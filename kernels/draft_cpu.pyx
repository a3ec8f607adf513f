# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""The layers of a draft, its passes and chains; see draft_cpu.pyi."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free

from .attention_cpu cimport RaggedBatch
from .cpu_types cimport PANEL, cpu_allocate, decoder_cache, draft_chain, ragged_batch
from .layers_cpu cimport Layers
from .matrices_cpu cimport PackedMatrix, check_matrix, check_rows, optional_norm
from .native_cpu cimport run_chain, run_draft


@cython.final
cdef class CpuDraft(Layers):
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
            done = run_chain(self.isa, &self.c, &c, &cache, &self.scratch)
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
