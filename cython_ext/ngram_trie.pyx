# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""The shared n-gram trie: every stream's text, indexed by its windows of up to max_depth tokens."""
from cython cimport final
from libc.stdlib cimport free, realloc
from libc.string cimport memmove, memset

from .draft_tree cimport (
    PROB, check_proposal, check_shape, tree_free, tree_grow_bfs, tree_grow_prob, tree_reserve,
    tree_reset, tree_write,
)
from .trie_check cimport check_pool
from .trie_pool cimport (
    EMPTIED, UNLINKED, Node, Slot, TopList, at, create_child, find_child,
    freq_of, pool_free, pool_init, pool_reserve, prefetch, prefetch_touch, release_node,
    released, slab_bytes, table_remove, take_root, top_children, top_of, touch_child,
)


cdef int check_tokens(const int[::1] tokens) except -1:
    cdef Py_ssize_t i
    for i in range(tokens.shape[0]):
        if tokens[i] < 0:
            raise ValueError(f"tokens[{i}] is {tokens[i]}: token ids are not negative")
    return 0


@final
cdef class NgramTrie:
    def __cinit__(self, int capacity, int max_depth=18, int slab_nodes=131072):
        if max_depth < 2:
            raise ValueError(f"max_depth is {max_depth}: must be at least 2")
        if capacity < max_depth:
            raise ValueError(f"capacity is {capacity}: must be at least max_depth ({max_depth})")
        if slab_nodes < 1 or slab_nodes & (slab_nodes - 1):
            raise ValueError(f"slab_nodes is {slab_nodes}: must be a power of two")
        self.max_depth = max_depth
        self.shift = slab_nodes.bit_length() - 1
        if pool_init(&self.pool, capacity, self.shift) < 0:
            raise MemoryError("no memory for the n-gram trie")
        self.free_streams = []
        self.salts = {}
        self.namespaces = {}
        self.namespace_of_root = {}

    def __dealloc__(self):
        pool_free(&self.pool)
        tree_free(&self.tree)
        free(self.streams)
        free(self.anchors)
        free(self.stamps)
        free(self.recent)
        free(self.cursors)

    # Namespaces and streams.

    def namespace(self, str salt not None):
        self.reap()
        known = self.salts.get(salt)
        if known is not None:
            return known
        cdef long long id = self.next_namespace
        self.next_namespace += 1
        cdef int root = self.new_root()
        self.salts[salt] = id
        self.namespaces[id] = [root, 0, salt]
        self.namespace_of_root[root] = id
        return id

    cdef int new_root(self) except -1:
        if pool_reserve(&self.pool, 1, 0) < 0:
            raise MemoryError("no memory for another namespace of the n-gram trie")
        return take_root(&self.pool)

    cdef int reap(self) except -1:
        """Drops namespaces that have neither text nor an open stream any more."""
        cdef int root
        cdef Node* node
        while self.pool.emptied:
            root = self.pool.emptied
            node = at(&self.pool, root)
            self.pool.emptied = node.older
            node.newer = UNLINKED
            id = self.namespace_of_root[root]
            if node.first_child == 0 and self.namespaces[id][1] == 0:
                del self.salts[self.namespaces[id][2]]
                del self.namespaces[id], self.namespace_of_root[root]
                release_node(&self.pool, root)
                self.pool.roots -= 1
        return 0

    def open_stream(self, long long namespace):
        entry = self.namespaces.get(namespace)
        if entry is None:
            raise ValueError(f"namespace {namespace} is unknown: ask namespace() for its id first")
        if not self.free_streams:
            self.grow_streams()
        cdef int stream = self.free_streams.pop()
        self.streams[stream].root = entry[0]
        self.streams[stream].length = 0
        self.anchors[<size_t>stream * self.max_depth] = entry[0]
        self.streams[stream].namespace = namespace
        entry[1] += 1
        return stream

    def close_stream(self, int stream):
        self.check_stream(stream)
        entry = self.namespaces[self.streams[stream].namespace]
        cdef Node* root = at(&self.pool, self.streams[stream].root)
        entry[1] -= 1
        self.streams[stream].root = 0
        self.free_streams.append(stream)
        if root.first_child == 0 and root.newer == UNLINKED:
            root.newer = EMPTIED
            root.older = self.pool.emptied
            self.pool.emptied = entry[0]

    cdef int grow_streams(self) except -1:
        cdef int room = max(8, 2 * self.stream_room), i
        cdef size_t row = self.max_depth * sizeof(int)
        cdef void* block
        block = realloc(self.streams, room * sizeof(Stream))
        if block != NULL:
            self.streams = <Stream*>block
            block = realloc(self.anchors, room * row)
        if block != NULL:
            self.anchors = <int*>block
            block = realloc(self.stamps, room * self.max_depth * sizeof(long long))
        if block != NULL:
            self.stamps = <long long*>block
            block = realloc(self.recent, room * row)
        if block == NULL:
            raise MemoryError(f"no memory for {room} streams of the n-gram trie")
        self.recent = <int*>block
        memset(self.streams + self.stream_room, 0, (room - self.stream_room) * sizeof(Stream))
        for i in range(room - 1, self.stream_room - 1, -1):
            self.free_streams.append(i)
        self.stream_room = room
        return 0

    cdef int grow_cursors(self, int rows) except -1:
        cdef void* block = realloc(self.cursors, 2 * rows * sizeof(int))
        if block == NULL:
            raise MemoryError(f"no memory for {rows} rows of proposals")
        self.cursors = <int*>block
        self.cursor_room = rows
        return 0

    cdef int check_stream(self, int stream) except -1:
        if not 0 <= stream < self.stream_room or self.streams[stream].root == 0:
            raise ValueError(f"stream {stream} is not open")
        return 0

    # Anchors. anchor(d) spells the stream's last d tokens; the kept id is only a cache of that.

    cdef int walk(self, int root, const int* tokens, int count) noexcept nogil:
        cdef int node = root, i
        for i in range(count):
            node = find_child(&self.pool, node, tokens[i])
            if node == 0:
                return 0
        return node

    cdef int anchor(self, int stream, int depth) noexcept nogil:
        cdef int* node = self.anchors + <size_t>stream * self.max_depth + depth
        cdef long long* stamp = self.stamps + <size_t>stream * self.max_depth + depth
        cdef int* recent
        if depth == 0:
            return self.streams[stream].root
        if node[0] and (
            stamp[0] == self.pool.evictions or released(&self.pool, node[0])[0] <= stamp[0]
        ):
            return node[0]
        self.walks += 1
        recent = self.recent + <size_t>stream * self.max_depth
        node[0] = self.walk(
            self.streams[stream].root, recent + self.streams[stream].length - depth, depth
        )
        stamp[0] = self.pool.evictions
        return node[0]

    cdef void remember(self, int stream, int token) noexcept nogil:
        cdef int* recent = self.recent + <size_t>stream * self.max_depth
        cdef int length = self.streams[stream].length
        if length == self.max_depth:
            memmove(recent, recent + 1, (length - 1) * sizeof(int))
            recent[length - 1] = token
        else:
            recent[length] = token
            self.streams[stream].length = length + 1

    cdef void fetch(self, int stream) noexcept nogil:
        """Fetches the likely children of every anchor, so that their cache misses overlap."""
        cdef int* anchors = self.anchors + <size_t>stream * self.max_depth
        cdef int depth
        for depth in range(min(self.streams[stream].length, self.max_depth - 1) + 1):
            prefetch(at(&self.pool, at(&self.pool, anchors[depth]).first_child))

    cdef int push(self, int stream, int token) except -1 nogil:
        """Counts `token` behind every suffix of the stream that the trie holds."""
        cdef Pool* pool = &self.pool
        cdef int* anchors = self.anchors + <size_t>stream * self.max_depth
        cdef long long* stamps = self.stamps + <size_t>stream * self.max_depth
        cdef int deepest = min(self.streams[stream].length, self.max_depth - 1)
        cdef int depth, parent, child
        cdef int created = min(deepest + 1, pool.capacity - pool.used)
        # A second child enters the table together with the first.
        if pool_reserve(pool, created, 2 * (deepest + 1)) < 0:
            with gil:
                raise MemoryError("no memory for more nodes of the n-gram trie")
        anchors[0] = self.streams[stream].root
        for depth in range(deepest + 1):
            prefetch_touch(pool, at(pool, anchors[depth]), anchors[depth], token)
        # Deepest first, so that shorter and more useful suffixes end up more recent.
        for depth in range(deepest, -1, -1):
            parent = self.anchor(stream, depth)
            child = 0
            if parent:
                child = find_child(pool, parent, token)
                if child:
                    touch_child(pool, parent, child)
                else:
                    child = create_child(pool, parent, token)
            if depth + 1 < self.max_depth:
                anchors[depth + 1] = child
                stamps[depth + 1] = pool.evictions
        self.remember(stream, token)
        return 0

    cdef int push_all(
        self, int stream, const int[::1] tokens, Py_ssize_t begin, Py_ssize_t end, bint learn
    ) except -1 nogil:
        cdef Py_ssize_t i
        if learn:
            for i in range(begin, end):
                self.fetch(stream)
                self.push(stream, tokens[i])
        elif end > begin:
            for i in range(max(begin, end - self.max_depth), end):
                self.remember(stream, tokens[i])
            memset(
                self.anchors + <size_t>stream * self.max_depth, 0, self.max_depth * sizeof(int)
            )
        return 0

    cdef int push_rows(
        self, const int[::1] streams, const int[::1] cu, const int[::1] tokens
    ) except -1 nogil:
        """Every row's first token, then every row's second: the next one's nodes come meanwhile."""
        cdef Py_ssize_t rows = streams.shape[0], r, ahead, column = 0, left = tokens.shape[0]
        while left:
            for r in range(rows):
                if cu[r] + column >= cu[r + 1]:
                    continue
                ahead = r + 1
                if ahead < rows and cu[ahead] + column < cu[ahead + 1]:
                    self.fetch(streams[ahead])
                self.push(streams[r], tokens[cu[r] + column])
                left -= 1
            column += 1
        return 0

    def extend(self, int stream, const int[::1] tokens not None, bint learn=True):
        self.check_stream(stream)
        check_tokens(tokens)
        with nogil:
            self.push_all(stream, tokens, 0, tokens.shape[0], learn)

    def extend_batch(
        self, const int[::1] streams not None, const int[::1] cu not None,
        const int[::1] tokens not None,
    ):
        cdef Py_ssize_t rows = streams.shape[0], r
        check_shape("cu", cu.shape[0], 1, rows + 1, 1)
        if cu[0] != 0 or cu[rows] != tokens.shape[0]:
            raise ValueError(f"cu: must run from 0 to the number of tokens, {tokens.shape[0]}")
        self.batches += 1
        for r in range(rows):
            self.check_stream(streams[r])
            if self.streams[streams[r]].batch == self.batches:
                raise ValueError(f"streams: {streams[r]} is in two rows; give each one row")
            self.streams[streams[r]].batch = self.batches
            if cu[r] > cu[r + 1]:
                raise ValueError(f"cu: falls from {cu[r]} to {cu[r + 1]} at row {r}")
        check_tokens(tokens)
        with nogil:
            self.push_rows(streams, cu, tokens)

    def recent_tokens(
        self, const int[::1] streams not None, int[:, ::1] tokens_out not None,
        int[::1] lengths_out not None,
    ):
        cdef Py_ssize_t rows = streams.shape[0], r
        cdef int i
        check_shape("tokens_out", tokens_out.shape[0], tokens_out.shape[1], rows, self.max_depth)
        check_shape("lengths_out", lengths_out.shape[0], 1, rows, 1)
        for r in range(rows):
            self.check_stream(streams[r])
            lengths_out[r] = self.streams[streams[r]].length
            for i in range(self.streams[streams[r]].length):
                tokens_out[r, i] = self.recent[<size_t>streams[r] * self.max_depth + i]

    # Proposals.

    cdef int propose_row(
        self, int stream, int cap, int match_type, int min_breadth, int max_breadth
    ) noexcept nogil:
        """Grows the tree of one stream; returns the depth of its longest usable anchor."""
        cdef int depth, node, match_len = 0
        tree_reset(&self.tree, cap)
        for depth in range(min(self.streams[stream].length, self.max_depth - 1), 0, -1):
            node = self.anchor(stream, depth)
            if node == 0 or at(&self.pool, node).first_child == 0:
                continue
            if match_len == 0:
                match_len = depth
            if self.tree.count >= cap:
                break
            if match_type == PROB:
                tree_grow_prob(&self.tree, &self.pool, top_children, node, max_breadth)
            else:
                tree_grow_bfs(
                    &self.tree, &self.pool, top_children, node, depth, self.max_depth,
                    min_breadth, max_breadth,
                )
        return match_len

    cdef void prefetch_rows(self, const int[::1] streams) noexcept nogil:
        """Walks all rows' likeliest paths side by side, so that their cache misses overlap."""
        cdef int r, depth, stream
        cdef int* anchors
        cdef int* down = self.cursors
        cdef int* along = self.cursors + streams.shape[0]
        for r in range(streams.shape[0]):
            stream = streams[r]
            anchors = self.anchors + <size_t>stream * self.max_depth
            down[r] = 0
            for depth in range(min(self.streams[stream].length, self.max_depth - 1), 0, -1):
                down[r] = at(&self.pool, anchors[depth]).first_child
                if anchors[depth] and down[r]:
                    break
            along[r] = down[r]
            prefetch(at(&self.pool, down[r]))
        for _ in range(8):
            for r in range(streams.shape[0]):
                along[r] = at(&self.pool, along[r]).next_sibling
                prefetch(at(&self.pool, along[r]))
                down[r] = at(&self.pool, down[r]).first_child
                prefetch(at(&self.pool, down[r]))

    def propose(
        self, const int[::1] streams not None, const int[::1] caps not None, int match_type,
        int min_breadth, int max_breadth, int[::1] counts_out not None,
        int[:, ::1] tokens_out not None, int[:, ::1] parents_out not None,
        int[::1] match_len_out not None, float[:, ::1] weights_out not None,
    ):
        cdef Py_ssize_t rows = streams.shape[0], r
        cdef int columns = <int>tokens_out.shape[1]
        check_proposal(
            match_type, min_breadth, max_breadth, rows, caps, counts_out, tokens_out, parents_out,
            match_len_out, weights_out,
        )
        for r in range(rows):
            self.check_stream(streams[r])
        if tree_reserve(&self.tree, columns, max_breadth) < 0:
            raise MemoryError("no memory for the draft tree")
        if rows > self.cursor_room:
            self.grow_cursors(<int>rows)
        with nogil:
            self.prefetch_rows(streams)
            for r in range(rows):
                match_len_out[r] = self.propose_row(
                    streams[r], max(0, min(caps[r], columns)), match_type, min_breadth, max_breadth
                )
                counts_out[r] = self.tree.count
                if columns:
                    tree_write(
                        &self.tree, columns, &tokens_out[r, 0], &parents_out[r, 0],
                        &weights_out[r, 0],
                    )

    # Housekeeping.

    def flush(self):
        cdef Pool fresh
        cdef int stream, root
        if pool_init(&fresh, self.pool.capacity, self.shift) < 0:
            pool_free(&fresh)
            raise MemoryError("no memory to start the n-gram trie anew")
        pool_free(&self.pool)
        self.pool = fresh
        self.namespace_of_root = {}
        for id, entry in self.namespaces.items():
            root = self.new_root()
            entry[0] = root
            self.namespace_of_root[root] = id
            if entry[1] == 0:
                at(&self.pool, root).newer = EMPTIED
                at(&self.pool, root).older = self.pool.emptied
                self.pool.emptied = root
        self.reap()
        for stream in range(self.stream_room):
            if self.streams[stream].root:
                self.streams[stream].root = self.namespaces[self.streams[stream].namespace][0]
        if self.stream_room:
            memset(self.anchors, 0, <size_t>self.stream_room * self.max_depth * sizeof(int))

    def children(self, long long namespace, path=()):
        """(token, freq) of the continuations of `path`, newest first; None if it is not held."""
        cdef int node = self.locate(namespace, path)
        found = []
        if node == 0:
            return None
        node = at(&self.pool, node).first_child
        while node:
            found.append((at(&self.pool, node).token, freq_of(at(&self.pool, node))))
            node = at(&self.pool, node).next_sibling
        return found

    cdef int locate(self, long long namespace, path) except -1:
        if namespace not in self.namespaces:
            raise ValueError(f"namespace {namespace} is unknown: ask namespace() for its id first")
        cdef int node = self.namespaces[namespace][0], token
        for token in path:
            node = find_child(&self.pool, node, token)
            if node == 0:
                break
        return node

    @property
    def node_count(self):
        return self.pool.used

    @property
    def namespace_count(self):
        return len(self.namespaces)

    @property
    def capacity(self):
        return self.pool.capacity

    @property
    def evictions(self):
        return self.pool.evictions

    @property
    def anchor_walks(self):
        return self.walks

    @property
    def slabs(self):
        return self.pool.slab_count

    @property
    def top_lists(self):
        return self.pool.top_used

    @property
    def memory_bytes(self):
        cdef size_t row = sizeof(Stream) + 4 * self.max_depth * sizeof(int)
        return (
            self.pool.slab_count * slab_bytes(self.shift)
            + (<size_t>self.pool.mask + 1) * sizeof(Slot)
            + self.pool.top_room * sizeof(TopList)
            + self.stream_room * row
        )

    def check(self):
        problem = check_pool(&self.pool, self.max_depth)
        if problem is not None:
            raise AssertionError(problem)
        cdef int stream
        open_streams = {id: 0 for id in self.namespaces}
        for stream in range(self.stream_room):
            if self.streams[stream].root == 0:
                continue
            if self.namespaces[self.streams[stream].namespace][0] != self.streams[stream].root:
                raise AssertionError(f"stream {stream} has a root that is not its namespace's")
            open_streams[self.streams[stream].namespace] += 1
        for id, (root, count, salt) in self.namespaces.items():
            if count != open_streams[id]:
                raise AssertionError(
                    f"namespace {id} counts {count} streams, has {open_streams[id]}"
                )
            if self.namespace_of_root.get(root) != id or self.salts.get(salt) != id:
                raise AssertionError(f"namespace {id} is not found by its root or salt")
        if not len(self.salts) == len(self.namespaces) == self.pool.roots:
            raise AssertionError("the namespaces, salts and roots differ in number")

    def _damage(self, str field not None, long long namespace, path, int value):
        """For tests of check(): overwrites one field of the node that `path` spells."""
        cdef int id = self.locate(namespace, path)
        cdef Node* node = at(&self.pool, id)
        if field == "freq":
            node.freq = value
        elif field == "token":
            node.token = value
        elif field == "parent":
            node.parent = value
        elif field == "next_sibling":
            node.next_sibling = value
        elif field == "older":
            node.older = value
        elif field == "newer":
            node.newer = value
        elif field == "table":
            table_remove(&self.pool, id)
        elif field == "used":
            self.pool.used += value
        elif field == "top":
            self.pool.tops[top_of(&self.pool, id)[0]].freqs[0] += value
        else:
            raise ValueError(f"field {field!r} is unknown")
