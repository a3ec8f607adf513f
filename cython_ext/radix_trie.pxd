from libc.stdint cimport int32_t, int64_t, uint64_t

cdef enum State:
    UNUSED = 0
    ROOT = 1
    NODE = 2

# `prev`/`next` link the unlocked nodes by recency, `chain` the hash bucket or the unused nodes.
cdef struct Node:
    State state
    int32_t *tokens
    int32_t *pages
    int32_t num_pages
    int32_t parent
    int32_t children
    int32_t refs
    int32_t own
    int32_t generation
    int32_t prev
    int32_t next
    int32_t chain
    uint64_t hash

cdef class RadixTrie:
    cdef Py_ssize_t _page_size
    cdef Node *_nodes
    cdef int32_t _capacity
    cdef int32_t _used
    cdef int32_t _unused
    cdef int32_t *_buckets
    cdef int32_t _bucket_mask
    cdef int32_t _node_count
    cdef int64_t _evictable
    cdef int64_t _locked
    cdef dict _roots
    cdef dict _names

    cdef int32_t _find(self, int32_t parent, const int32_t *tokens) noexcept nogil
    cdef void _index(self, int32_t node) noexcept nogil
    cdef void _unindex(self, int32_t node) noexcept nogil
    cdef void _link_after(self, int32_t node, int32_t prev) noexcept nogil
    cdef void _unlink(self, int32_t node) noexcept nogil
    cdef void _touch(self, int32_t node) noexcept nogil
    cdef int64_t _handle(self, int32_t node) noexcept nogil
    cdef int32_t _resolve(self, int64_t handle) except -1
    cdef int _grow(self) except -1
    cdef int32_t _root(self, str namespace) except -1
    cdef int32_t _new(
        self, int32_t parent, const int32_t *tokens, const int32_t *pages, int32_t num_pages
    ) except -1
    cdef int32_t _split(self, int32_t lower, int32_t at) except -1
    cdef int32_t _walk(
        self, int32_t root, const int32_t *tokens, Py_ssize_t num_pages, Py_ssize_t *matched
    ) except -1
    cdef int _drop_tail(self, int32_t node, int32_t num_pages, int32_t *out) except -1
    cdef void _shrink(self, Node *node, int32_t num_pages) noexcept nogil
    cdef void _retire(self, int32_t node) noexcept nogil
    cdef list _check_recency(self)
    cdef int _check_node(self, int32_t node, list age) except -1
