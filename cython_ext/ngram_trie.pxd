# cython: language_level=3
from .draft_tree cimport DraftTree
from .trie_pool cimport Pool


cdef struct Stream:
    int root            # 0 = closed
    int length          # remembered tokens, at most max_depth
    long long namespace
    long long batch     # the last extend_batch that named it


cdef class NgramTrie:
    cdef Pool pool
    cdef DraftTree tree
    cdef readonly int max_depth
    cdef int shift
    cdef Stream* streams        # [stream_room]
    cdef int* anchors           # [stream_room, max_depth]: node of the last d tokens, 0 = none
    cdef long long* stamps      # [stream_room, max_depth]: evictions when the anchor was set
    cdef int* recent            # [stream_room, max_depth]: remembered tokens, oldest first
    cdef int stream_room
    cdef int* cursors           # [2, cursor_room] scratch
    cdef int cursor_room
    cdef list free_streams
    cdef dict salts             # salt -> namespace id
    cdef dict namespaces        # namespace id -> [root, open streams, salt]
    cdef dict namespace_of_root
    cdef long long next_namespace
    cdef long long walks
    cdef long long batches

    cdef int anchor(self, int stream, int depth) noexcept nogil
    cdef int walk(self, int root, const int* tokens, int count) noexcept nogil
    cdef void remember(self, int stream, int token) noexcept nogil
    cdef int push(self, int stream, int token) except -1 nogil
    cdef int push_all(self, int stream, const int[::1] tokens, Py_ssize_t begin, Py_ssize_t end,
                      bint learn) except -1 nogil
    cdef void fetch(self, int stream) noexcept nogil
    cdef int push_rows(self, const int[::1] streams, const int[::1] cu,
                       const int[::1] tokens) except -1 nogil
    cdef int propose_row(self, int stream, int cap, int match_type, int min_breadth,
                         int max_breadth) noexcept nogil
    cdef int grow_cursors(self, int rows) except -1
    cdef void prefetch_rows(self, const int[::1] streams) noexcept nogil
    cdef int check_stream(self, int stream) except -1
    cdef int reap(self) except -1
    cdef int new_root(self) except -1
    cdef int grow_streams(self) except -1
    cdef int locate(self, long long namespace, path) except -1
