# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""EAGLE's rounds of chains, each half of a round in one call; see draft_chains_cpu.pyi."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy

import numpy as np

from .attention_cpu cimport RaggedBatch
from .cpu_types cimport (
    EPILOGUE_STORE, PANEL, cpu_allocate, decoder_cache, draft_chain, ragged_batch,
)
from .draft_cpu cimport CpuDraft
from .draft_rows_cpu cimport drop_junk, extend_inputs, write_chains
from .matrices_cpu cimport PackedMatrix, check_matrix, check_rows, optional_norm
from .native_cpu cimport matmul, norm_rows, run_chain, run_draft

cdef extern from "row_argmax.h" nogil:
    int64_t outrider_row_argmax(const float *x, int64_t n)


@cython.final
cdef class _Entries:
    """The layout of a pass over what rows accepted; arrays that grow."""

    cdef int64_t[::1] next_ids, sources, positions, kv_slots, no_bits, select, chosen
    cdef int32_t[::1] kv_lens, begins
    cdef uint8_t[::1] plain

    def __init__(self):
        self.reserve(64, 16)

    cdef int reserve(self, int64_t tokens, int64_t rows) except -1:
        if self.next_ids is None or self.next_ids.shape[0] < tokens:
            self.next_ids, self.sources, self.positions, self.kv_slots, self.no_bits = np.zeros(
                (5, tokens), dtype=np.int64
            )
        if self.select is None or self.select.shape[0] < rows:
            self.select, self.chosen = np.zeros((2, rows), dtype=np.int64)
            self.kv_lens, self.begins = np.zeros((2, rows + 1), dtype=np.int32)
            self.plain = np.zeros(rows, dtype=np.uint8)
        return 0


@cython.final
cdef class CpuChains:
    """A draft that is drafted with chain by chain; see draft_chains_cpu.pyi."""

    cdef CpuDraft layers
    cdef PackedMatrix head, fc
    cdef const int64_t[::1] token_ids
    cdef const float *input_norm
    cdef const float[:, ::1] chunk_norms
    cdef bint norm_output
    cdef object kept
    cdef int64_t width
    cdef _Entries entries
    cdef float *floats
    cdef int64_t num_floats

    def __init__(self, CpuDraft layers, PackedMatrix head, const int64_t[::1] token_ids,
                 bint norm_output, *, PackedMatrix fc=None, input_norm=None, chunk_norms=None):
        cdef int64_t i, size = layers.c.hidden
        if layers.arrays is None or None in layers.layer_arrays:
            raise RuntimeError("set_ends and set_layer come first")
        check_matrix(head, "head", head.c.n, size, False)
        if norm_output and layers.c.final_norm == NULL:
            raise ValueError("norm_output: this draft has no final norm")
        if token_ids is None:
            if head.c.n > layers.vocabulary:
                raise ValueError(f"head: has {head.c.n} outputs for {layers.vocabulary} tokens")
        else:
            if token_ids.shape[0] != head.c.n:
                raise ValueError(f"token_ids: has {token_ids.shape[0]} ids for {head.c.n} outputs")
            for i in range(token_ids.shape[0]):
                if not 0 <= token_ids[i] < layers.vocabulary:
                    raise ValueError(f"token_ids: {token_ids[i]} is outside the vocabulary")
        self.width = size
        if fc is not None:
            check_matrix(fc, "fc", size, fc.c.k, False)
            self.width = fc.c.k
        elif input_norm is not None or chunk_norms is not None:
            raise ValueError("input_norm, chunk_norms: only in front of an fc")
        self.input_norm = optional_norm(input_norm, "input_norm", self.width)
        if chunk_norms is not None:
            self.chunk_norms = chunk_norms
            if self.chunk_norms.shape[0] * self.chunk_norms.shape[1] != self.width:
                raise ValueError(f"chunk_norms: do not make {self.width} columns")
        self.layers, self.head, self.fc = layers, head, fc
        self.token_ids, self.norm_output, self.kept = token_ids, norm_output, input_norm
        self.entries = _Entries()

    def __dealloc__(self):
        free(self.floats)

    def draft(
        self, const int32_t[::1] slots, const int32_t[::1] caps, const int32_t[::1] seq_lens,
        const int32_t[:, ::1] page_table, const int64_t[:, ::1] first, const float[:, ::1] hidden,
        float[:, :, :, :, ::1] kv, int64_t page_size, const float[:, ::1] cos,
        const float[:, ::1] sin, int64_t levels, const int32_t[::1] cu_q, int32_t[::1] tokens,
        int32_t[::1] parents, int32_t[::1] proposed, int32_t[::1] depths,
    ):
        """Chains, every further token one pass."""
        cdef draft_chain c
        cdef decoder_cache cache
        cdef int64_t rows = slots.shape[0], total = 0, r, last, size = self.layers.c.hidden
        cdef int64_t most = 1, places = min(cos.shape[0], sin.shape[0])
        cdef int done
        cdef char *memory
        cdef int64_t *drafts
        cdef float *begin
        if self.layers.busy:
            raise RuntimeError("the layers run one pass at a time")
        if not rows or levels < 1:
            return
        if caps.shape[0] != rows:
            raise ValueError("slots, caps: do not agree on the rows")
        for r in range(rows):
            most = max(most, caps[r])
        levels = min(levels, most)
        check_rows(hidden, "hidden", first.shape[0], size)
        self.layers.check_cache(kv, cos, sin, &cache)
        if page_size < 1 or page_table.shape[1] < 1 or seq_lens.shape[0] != page_table.shape[0]:
            raise ValueError("page_table, seq_lens: do not agree on the slots")
        for r in range(rows):
            if not 0 <= slots[r] < min(seq_lens.shape[0], first.shape[0]):
                raise ValueError(f"slots: {slots[r]} is outside the table")
            if not 0 <= first[slots[r], 0] < self.layers.vocabulary:
                raise ValueError(f"first: token {first[slots[r], 0]} is outside the vocabulary")
            last = seq_lens[slots[r]] + levels - 2 if caps[r] > 0 and levels > 1 else 0
            if not 0 <= last < places or seq_lens[slots[r]] < 0:
                raise ValueError(f"seq_lens: position {last} is outside the rotary table")
            total += last + 1
        self.layers.reserve(rows)
        memory = <char *>cpu_allocate(
            rows * ((3 * size + self.head.c.panels * PANEL) * sizeof(float)
                    + (4 + levels) * sizeof(int64_t))
            + (2 * rows + 1 + total) * sizeof(int32_t) + rows
        )
        if memory == NULL:
            raise MemoryError(f"no memory for a chain of {rows} rows")
        drafts = <int64_t *>memory
        c.rows, c.passes, c.pages = rows, levels - 1, kv.shape[2] // page_size
        c.table_width, c.page_size = page_table.shape[1], page_size
        c.slot_of, c.caps, c.seq_lens = &slots[0], &caps[0], &seq_lens[0]
        c.page_table, c.head = &page_table[0, 0], &self.head.c
        c.token_ids = NULL
        if self.token_ids is not None:
            c.token_ids = &self.token_ids[0]
        c.drafts, c.ids = drafts + rows, drafts + levels * rows
        c.positions, c.kv_slots, c.tree_bits = c.ids + rows, c.ids + 2 * rows, c.ids + 3 * rows
        c.logits = <float *>(c.ids + 4 * rows)
        c.recurrent = c.logits + rows * self.head.c.panels * PANEL
        c.normed = c.recurrent + rows * size
        begin = c.normed + rows * size
        c.kv_lens = <int32_t *>(begin + rows * size)
        c.cu_q = c.kv_lens + rows
        c.slot_list = c.cu_q + rows + 1
        c.is_tree = <uint8_t *>(c.slot_list + total)
        c.norm_output, c.hidden = self.norm_output, begin
        if self.layers.c.final_norm == NULL:
            c.normed = NULL
        for r in range(rows):
            drafts[r] = c.ids[r] = first[slots[r], 0]
            c.cu_q[r + 1] = <int32_t>r + 1
            memcpy(begin + r * size, &hidden[slots[r], 0], size * sizeof(float))
        self.layers.busy = True
        with nogil:
            done = run_chain(self.layers.isa, &self.layers.c, &c, &cache, &self.layers.scratch)
        self.layers.busy = False
        try:
            if not done:
                raise ValueError("page_table: names a page outside the cache")
            write_chains(<int64_t[:levels, :rows]>drafts, cu_q, caps, tokens, parents, proposed,
                         depths)
        finally:
            free(memory)

    def follow(
        self, const int32_t[::1] slots, const uint8_t[::1] kinds, const int32_t[::1] starts,
        const int32_t[::1] accept_lens, const int32_t[:, :] tokens, const int32_t[:, :] path,
        const int64_t[::1] input_ids, const int64_t[::1] kv_slots, const int32_t[::1] cu_q,
        const int32_t[::1] kv_lens, const int32_t[:, ::1] page_table,
        const int32_t[:, :] prompts, const float[:, ::1] features, float[:, :, :, :, ::1] kv,
        int64_t page_size, const float[:, ::1] cos, const float[:, ::1] sin,
        int64_t[:, ::1] first, float[:, ::1] hidden,
    ):
        """A pass over what was accepted, for the slots' next first tokens."""
        cdef CpuDraft layers = self.layers
        cdef decoder_cache cache
        cdef RaggedBatch batch
        cdef ragged_batch last
        cdef int64_t rows = slots.shape[0], total = input_ids.shape[0], size = layers.c.hidden
        cdef int64_t kept, r
        cdef _Entries e = self.entries
        cdef float *stream
        cdef float *normed
        cdef float *head_input
        if kv_slots.shape[0] != total or kv_lens.shape[0] != rows:
            raise ValueError("kv_slots, kv_lens: do not agree on the tokens and rows")
        check_rows(features, "features", total, self.width)
        check_rows(hidden, "hidden", first.shape[0], size)
        for r in range(rows):
            if not 0 <= slots[r] < first.shape[0]:
                raise ValueError(f"slots: {slots[r]} is outside the state")
        if not rows or not total:
            return
        e.reserve(total, rows)
        memcpy(&e.kv_slots[0], &kv_slots[0], total * sizeof(int64_t))
        memcpy(&e.kv_lens[0], &kv_lens[0], rows * sizeof(int32_t))
        extend_inputs(slots, kinds, starts, cu_q, accept_lens, tokens, path, input_ids, prompts,
                      e.next_ids, e.sources, e.positions, e.select)
        kept = drop_junk(kinds, accept_lens, cu_q, e.next_ids, e.sources, e.positions, e.kv_slots,
                         e.kv_lens, e.begins, e.select)
        self.reserve(kept, rows)
        stream = self.floats
        normed = stream + kept * size
        batch = layers.prepare(
            e.next_ids[:kept], e.positions[:kept], e.kv_slots[:kept], e.begins[:rows + 1],
            e.kv_lens[:rows], page_table, e.no_bits[:kept], e.plain[:rows], kv, page_size, cos,
            sin, &cache,
        )
        batch.trim(e.select[:rows], &last)
        head_input = stream if layers.c.final_norm == NULL else normed
        layers.busy = True
        with nogil:
            self.take_in(features, kept, stream, normed + kept * size)
            run_draft(layers.isa, &layers.c, &batch.c, &last, &cache, &layers.scratch, stream,
                      NULL if self.norm_output else stream,
                      NULL if layers.c.final_norm == NULL else normed)
            self.choose(head_input, rows, normed + kept * (size + self.width))
        layers.busy = False
        if self.norm_output:
            stream = normed
        for r in range(rows):
            first[slots[r], 0] = e.chosen[r]
            memcpy(&hidden[slots[r], 0], stream + e.select[r] * size, size * sizeof(float))

    cdef int reserve(self, int64_t tokens, int64_t rows) except -1:
        """Floats for streams and features of tokens, for head inputs and logits of rows."""
        cdef int64_t size = tokens * (2 * self.layers.c.hidden + self.width)
        size += rows * (self.layers.c.hidden + self.head.c.panels * PANEL)
        if size > self.num_floats:
            free(self.floats)
            self.num_floats = 0
            self.floats = <float *>cpu_allocate(size * sizeof(float))
            if self.floats == NULL:
                raise MemoryError(f"no memory for a pass of {tokens} tokens")
            self.num_floats = size
        return 0

    cdef void take_in(self, const float[:, ::1] features, int64_t count, float *out,
                      float *normed) noexcept nogil:
        """Hidden states of the entries' features, [count, hidden]; normed [count, width]."""
        cdef int64_t i, chunk, wide = self.width, size
        cdef float eps = self.layers.c.eps
        cdef float *row
        if self.fc is None:
            normed = out
        for i in range(count):
            row = normed + i * wide
            memcpy(row, &features[self.entries.sources[i], 0], wide * sizeof(float))
            if self.input_norm != NULL:
                norm_rows(self.layers.isa, row, self.input_norm, 1, wide, eps, row)
            if self.chunk_norms is not None:
                size = self.chunk_norms.shape[1]
                for chunk in range(self.chunk_norms.shape[0]):
                    norm_rows(self.layers.isa, row + chunk * size, &self.chunk_norms[chunk, 0], 1,
                              size, eps, row + chunk * size)
        if self.fc is not None:
            matmul(self.layers.isa, &self.fc.c, normed, wide, count, out, self.layers.c.hidden,
                   EPILOGUE_STORE)

    cdef void choose(self, const float *head_input, int64_t rows, float *work) noexcept nogil:
        """The best token behind each row's newest entry."""
        cdef int64_t r, best, size = self.layers.c.hidden, outputs = self.head.c.n
        cdef float *logits = work + rows * size
        for r in range(rows):
            memcpy(work + r * size, head_input + self.entries.select[r] * size,
                   size * sizeof(float))
        matmul(self.layers.isa, &self.head.c, work, size, rows, logits, outputs, EPILOGUE_STORE)
        for r in range(rows):
            best = max(0, outrider_row_argmax(logits + r * outputs, outputs))
            self.entries.chosen[r] = best if self.token_ids is None else self.token_ids[best]
