# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Ragged batches over paged KV, and attention over them; see attention_cpu.pyi."""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free

from .cpu_types cimport attention_args, cpu_allocate, ragged_batch, softmax_state
from .native_cpu cimport attend, isa_of

cdef int64_t MAX_TREE = 64


@cython.final
cdef class RaggedBatch:
    """The arrays of a batch, checked against the cache they address."""

    def __dealloc__(self):
        free(self.slots)
        free(self.first)

    @staticmethod
    cdef RaggedBatch make(
        const int64_t[::1] positions, const int32_t[::1] cu_q, const int32_t[::1] kv_lens,
        const int32_t[:, ::1] page_table, const int64_t[::1] tree_bits,
        const uint8_t[::1] is_tree, int64_t page_size, int64_t num_slots,
    ):
        cdef RaggedBatch self = RaggedBatch.__new__(RaggedBatch)
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
    cdef RaggedBatch batch = RaggedBatch.make(
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
        attend(level, &args, &batch.c, batch.slots)
    free(args.states)
    free(args.visible)
