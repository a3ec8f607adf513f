# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Radix tree over token ids that says which KV pages hold a prefix.

Edges hold whole pages, so children of a node differ somewhere in their first page and one hash
table keyed by (parent, first page) finds a child. The unlocked nodes form one list by recency.
Whoever touches a path appends it from its deepest node to its shallowest, and a locked node locks
all its ancestors; hence a node always stands before its ancestors, the head of the list is always
a leaf, and eviction is O(1) a node without a heap.
"""

from collections import namedtuple

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove

import numpy as np

RadixMatch = namedtuple("RadixMatch", ("length", "pages", "node"), module=__name__)
RadixInsert = namedtuple("RadixInsert", ("existing", "node"), module=__name__)

cdef enum:
    MAX_NODES = 1 << 30


cdef uint64_t hash_page(int32_t parent, const int32_t *tokens, Py_ssize_t size) noexcept nogil:
    cdef uint64_t h = <uint64_t>parent * 0x9E3779B97F4A7C15ULL
    cdef Py_ssize_t i
    for i in range(size):
        h = (h ^ <uint64_t><unsigned int>tokens[i]) * 0xD6E8FEB86659FD93ULL
        h ^= h >> 32
    return h


cdef Py_ssize_t common_pages(
    const int32_t *a, const int32_t *b, Py_ssize_t pages, Py_ssize_t page_size
) noexcept nogil:
    cdef Py_ssize_t i = 0, n = pages * page_size
    while i < n and a[i] == b[i]:
        i += 1
    return i // page_size


@cython.final
cdef class RadixTrie:
    """Page-aligned prefix tree with a root for each namespace, locks, and LRU eviction.

    Time is the order of the calls: the same calls give the same answers. Node handles are ints,
    0 means "nothing matched"; a handle stands for one prefix until any of its pages is evicted and
    raises ValueError afterwards.
    """

    def __cinit__(self, Py_ssize_t page_size):
        if not 0 < page_size <= 65536:
            raise ValueError(f"page_size is {page_size}: give 1 to 65536 tokens")
        self._page_size = page_size
        self._roots = {}
        self._names = {}
        # Node 0 is no node: it heads the recency list and ends the chains.
        self._capacity = 64
        self._used = 1
        self._bucket_mask = 63
        self._nodes = <Node *>calloc(self._capacity, sizeof(Node))
        self._buckets = <int32_t *>calloc(self._bucket_mask + 1, sizeof(int32_t))
        if self._nodes is NULL or self._buckets is NULL:
            raise MemoryError("no memory for an empty radix tree")

    def __dealloc__(self):
        cdef int32_t i
        if self._nodes is not NULL:
            for i in range(1, self._used):
                free(self._nodes[i].tokens)
                free(self._nodes[i].pages)
        free(self._nodes)
        free(self._buckets)

    cdef int32_t _find(self, int32_t parent, const int32_t *tokens) noexcept nogil:
        """Child of `parent` whose first page is `tokens`; 0 when there is none."""
        cdef uint64_t h = hash_page(parent, tokens, self._page_size)
        cdef int32_t node = self._buckets[h & self._bucket_mask]
        cdef size_t size = self._page_size * sizeof(int32_t)
        while node:
            if (
                self._nodes[node].hash == h
                and self._nodes[node].parent == parent
                and memcmp(self._nodes[node].tokens, tokens, size) == 0
            ):
                return node
            node = self._nodes[node].chain
        return 0

    cdef void _index(self, int32_t node) noexcept nogil:
        cdef Node *n = &self._nodes[node]
        n.hash = hash_page(n.parent, n.tokens, self._page_size)
        n.chain = self._buckets[n.hash & self._bucket_mask]
        self._buckets[n.hash & self._bucket_mask] = node

    cdef void _unindex(self, int32_t node) noexcept nogil:
        cdef int32_t *place = &self._buckets[self._nodes[node].hash & self._bucket_mask]
        while place[0] != node:
            place = &self._nodes[place[0]].chain
        place[0] = self._nodes[node].chain

    cdef void _link_after(self, int32_t node, int32_t prev) noexcept nogil:
        cdef int32_t after = self._nodes[prev].next
        self._nodes[node].prev = prev
        self._nodes[node].next = after
        self._nodes[prev].next = node
        self._nodes[after].prev = node

    cdef void _unlink(self, int32_t node) noexcept nogil:
        self._nodes[self._nodes[node].prev].next = self._nodes[node].next
        self._nodes[self._nodes[node].next].prev = self._nodes[node].prev

    cdef void _touch(self, int32_t node) noexcept nogil:
        """Make the path to this node the most recent one; locked nodes get theirs at `unlock`."""
        while self._nodes[node].state == State.NODE:
            if self._nodes[node].refs == 0:
                self._unlink(node)
                self._link_after(node, self._nodes[0].prev)
            node = self._nodes[node].parent

    cdef int64_t _handle(self, int32_t node) noexcept nogil:
        if self._nodes[node].state != State.NODE:
            return 0
        return (<int64_t>self._nodes[node].generation << 32) | node

    cdef int32_t _resolve(self, int64_t handle) except -1:
        cdef int64_t node = handle & 0xFFFFFFFF
        if (
            handle <= 0 or node >= self._used or self._nodes[node].state != State.NODE
            or self._nodes[node].generation != handle >> 32
        ):
            raise ValueError(f"node handle {handle} is stale: pages of its prefix were evicted")
        return <int32_t>node

    cdef int _grow(self) except -1:
        """Make room for one more node in the node array and the hash table."""
        cdef Node *nodes
        cdef int32_t *buckets
        cdef int32_t node, size
        if self._unused == 0 and self._used == self._capacity:
            if self._capacity >= MAX_NODES:
                raise MemoryError(f"the radix tree is limited to {<int>MAX_NODES} nodes")
            nodes = <Node *>realloc(self._nodes, 2 * self._capacity * sizeof(Node))
            if nodes is NULL:
                raise MemoryError("no memory for more radix tree nodes")
            self._nodes = nodes
            self._capacity *= 2
        if self._node_count > self._bucket_mask:
            size = 2 * (self._bucket_mask + 1)
            buckets = <int32_t *>calloc(size, sizeof(int32_t))
            if buckets is NULL:
                raise MemoryError("no memory for the radix tree's hash table")
            free(self._buckets)
            self._buckets = buckets
            self._bucket_mask = size - 1
            for node in range(1, self._used):
                if self._nodes[node].state == State.NODE:
                    self._index(node)
        return 0

    cdef int32_t _new(
        self, int32_t parent, const int32_t *tokens, const int32_t *pages, int32_t num_pages
    ) except -1:
        """A node with its pages copied, in neither the hash table nor the recency list yet."""
        cdef size_t page_bytes = num_pages * sizeof(int32_t)
        cdef int32_t *own_tokens = NULL
        cdef int32_t *own_pages = NULL
        cdef int32_t node
        cdef int32_t generation = 0
        self._grow()
        if num_pages:
            own_tokens = <int32_t *>malloc(page_bytes * self._page_size)
            own_pages = <int32_t *>malloc(page_bytes)
            if own_tokens is NULL or own_pages is NULL:
                free(own_tokens)
                free(own_pages)
                raise MemoryError("no memory for a radix tree node")
            memcpy(own_tokens, tokens, page_bytes * self._page_size)
            memcpy(own_pages, pages, page_bytes)
        if self._unused:
            node = self._unused
            self._unused = self._nodes[node].chain
            generation = self._nodes[node].generation
        else:
            node = self._used
            self._used += 1
        self._nodes[node] = Node(
            state=State.NODE if num_pages else State.ROOT, tokens=own_tokens, pages=own_pages,
            num_pages=num_pages, parent=parent, children=0, refs=0, own=0, generation=generation,
            prev=0, next=0, chain=0, hash=0,
        )
        return node

    cdef int32_t _root(self, str namespace) except -1:
        cdef int32_t root
        if namespace in self._roots:
            return self._roots[namespace]
        root = self._new(0, NULL, NULL, 0)
        self._roots[namespace] = root
        self._names[root] = namespace
        return root

    cdef int32_t _split(self, int32_t lower, int32_t at) except -1:
        """Move the first `at` pages of a node into a new parent; handles and locks stay below."""
        cdef Node *low = &self._nodes[lower]
        cdef int32_t upper = self._new(low.parent, low.tokens, low.pages, at)
        cdef Node *up = &self._nodes[upper]
        cdef int32_t rest
        low = &self._nodes[lower]
        self._unindex(lower)
        up.children = 1
        up.refs = low.refs
        rest = low.num_pages - at
        memmove(
            low.tokens, low.tokens + at * self._page_size,
            rest * self._page_size * sizeof(int32_t),
        )
        memmove(low.pages, low.pages + at, rest * sizeof(int32_t))
        self._shrink(low, rest)
        low.parent = upper
        self._index(upper)
        self._index(lower)
        self._node_count += 1
        if up.refs == 0:
            self._link_after(upper, lower)
        return upper

    cdef void _shrink(self, Node *node, int32_t num_pages) noexcept nogil:
        cdef void *smaller = realloc(
            node.tokens, num_pages * self._page_size * sizeof(int32_t)
        )
        if smaller is not NULL:
            node.tokens = <int32_t *>smaller
        smaller = realloc(node.pages, num_pages * sizeof(int32_t))
        if smaller is not NULL:
            node.pages = <int32_t *>smaller
        node.num_pages = num_pages

    cdef int32_t _walk(
        self, int32_t root, const int32_t *tokens, Py_ssize_t num_pages, Py_ssize_t *matched
    ) except -1:
        """Deepest node on the path of these pages, split so that it ends where they part."""
        cdef int32_t node = root, child
        cdef Py_ssize_t done = 0, common
        while done < num_pages:
            child = self._find(node, tokens + done * self._page_size)
            if child == 0:
                break
            common = common_pages(
                self._nodes[child].tokens, tokens + done * self._page_size,
                min(<Py_ssize_t>self._nodes[child].num_pages, num_pages - done), self._page_size,
            )
            done += common
            if common < self._nodes[child].num_pages:
                node = self._split(child, <int32_t>common)
                break
            node = child
        matched[0] = done
        return node

    cdef int _drop_tail(self, int32_t node, int32_t num_pages, int32_t *out) except -1:
        """Take pages off an unlocked leaf, last first; a leaf without pages goes away."""
        cdef Node *n = &self._nodes[node]
        cdef int32_t i, parent = n.parent
        for i in range(num_pages):
            out[i] = n.pages[n.num_pages - 1 - i]
        n.generation = (n.generation + 1) & 0x7FFFFFFF
        self._evictable -= num_pages
        if num_pages < n.num_pages:
            self._shrink(n, n.num_pages - num_pages)
            return 0
        self._unindex(node)
        self._unlink(node)
        self._retire(node)
        self._node_count -= 1
        self._nodes[parent].children -= 1
        if self._nodes[parent].state == State.ROOT and self._nodes[parent].children == 0:
            del self._roots[self._names.pop(parent)]
            self._retire(parent)
        return 0

    cdef void _retire(self, int32_t node) noexcept nogil:
        cdef Node *n = &self._nodes[node]
        free(n.tokens)
        free(n.pages)
        n.tokens = NULL
        n.pages = NULL
        n.state = State.UNUSED
        n.chain = self._unused
        self._unused = node

    @property
    def page_size(self):
        """Tokens in a page."""
        return self._page_size

    @property
    def evictable_pages(self):
        """Pages that no lock protects."""
        return self._evictable

    @property
    def locked_pages(self):
        """Pages on the path of at least one lock."""
        return self._locked

    @property
    def total_pages(self):
        """All pages held."""
        return self._evictable + self._locked

    @property
    def node_count(self):
        """Nodes that hold pages (the namespaces' roots hold none)."""
        return self._node_count

    @property
    def namespace_count(self):
        """Namespaces that hold pages; an emptied one is forgotten."""
        return len(self._roots)

    def match(self, const int32_t[::1] tokens not None, str namespace not None, limit=None):
        """Find the longest cached prefix of tokens (int32 [n]), at most `limit` tokens of it.

        Whole pages only. Returns RadixMatch(length in tokens, pages int32 [length / page_size],
        node handle, 0 when nothing matched) and makes the path the most recently used. The pages
        stay valid only while the node is locked.
        """
        cdef Py_ssize_t n = tokens.shape[0], matched = 0, done, i
        cdef int32_t root, node = 0, at
        cdef int32_t[::1] view
        if limit is not None:
            if limit < 0:
                raise ValueError(f"limit is {limit}: a number of tokens cannot be negative")
            n = min(n, <Py_ssize_t>min(limit, n))
        n //= self._page_size
        if n and namespace in self._roots:
            root = self._roots[namespace]
            node = self._walk(root, &tokens[0], n, &matched)
        pages = np.empty(matched, np.int32)
        if matched:
            self._touch(node)
            view = pages
            at = node
            done = matched
            while self._nodes[at].state == State.NODE:
                done -= self._nodes[at].num_pages
                for i in range(self._nodes[at].num_pages):
                    view[done + i] = self._nodes[at].pages[i]
                at = self._nodes[at].parent
        return RadixMatch(matched * self._page_size, pages, self._handle(node))

    def insert(
        self,
        const int32_t[::1] tokens not None,
        const int32_t[::1] pages not None,
        str namespace not None,
    ):
        """Cache the whole pages of tokens (int32 [n]); pages (int32 [>= n // page_size]) hold them.

        Returns RadixInsert(existing, node). The first `existing` pages were cached before: the
        tree keeps its own and the ones passed in stay the caller's. The rest now belong to the
        tree. The path becomes the most recently used, unlocked unless it was locked. Raises
        ValueError, changing nothing, for too few pages and for a page id below 1.
        """
        cdef Py_ssize_t matched = 0, i, n = tokens.shape[0] // self._page_size
        cdef int32_t node, leaf
        if pages.shape[0] < n:
            raise ValueError(
                f"pages has {pages.shape[0]} elements but {tokens.shape[0]} tokens fill {n} pages"
            )
        if n == 0:
            return RadixInsert(0, 0)
        for i in range(n):
            if pages[i] < 1:
                raise ValueError(f"pages[{i}] is {pages[i]}: cacheable pages start at 1")
        node = self._walk(self._root(namespace), &tokens[0], n, &matched)
        if matched < n:
            leaf = self._new(
                node, &tokens[matched * self._page_size], &pages[matched], <int32_t>(n - matched)
            )
            self._index(leaf)
            self._link_after(leaf, self._nodes[0].prev)
            self._nodes[node].children += 1
            self._node_count += 1
            self._evictable += n - matched
            node = leaf
        self._touch(node)
        return RadixInsert(matched, self._handle(node))

    def lock(self, int64_t node):
        """Protect a node and its ancestors from eviction; locks count. Handle 0 locks nothing."""
        cdef int32_t at
        if node == 0:
            return
        at = self._resolve(node)
        self._nodes[at].own += 1
        while self._nodes[at].state == State.NODE:
            if self._nodes[at].refs == 0:
                self._unlink(at)
                self._evictable -= self._nodes[at].num_pages
                self._locked += self._nodes[at].num_pages
            self._nodes[at].refs += 1
            at = self._nodes[at].parent

    def unlock(self, int64_t node):
        """Undo one `lock` of this handle; nodes set free become the most recently used.

        Raises ValueError when this handle has no lock left (a descendant's lock does not count).
        """
        cdef int32_t at
        if node == 0:
            return
        at = self._resolve(node)
        if self._nodes[at].own == 0:
            raise ValueError(f"node handle {node} is not locked: unlock without a lock")
        self._nodes[at].own -= 1
        while self._nodes[at].state == State.NODE:
            self._nodes[at].refs -= 1
            if self._nodes[at].refs == 0:
                self._link_after(at, self._nodes[0].prev)
                self._evictable += self._nodes[at].num_pages
                self._locked -= self._nodes[at].num_pages
            at = self._nodes[at].parent

    def evict(self, int64_t num_pages):
        """Take min(num_pages, evictable_pages) least recently used unlocked pages out; int32 [k].

        A leaf loses only as many tail pages as needed, the deepest first. A node that lost a page
        has a stale handle; its parent is next in line once it has no children.
        """
        cdef int32_t node
        cdef int64_t filled = 0, k, total
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}: a number of pages cannot be negative")
        total = min(num_pages, self._evictable)
        pages = np.empty(total, np.int32)
        cdef int32_t[::1] view = pages
        while filled < total:
            node = self._nodes[0].next
            k = min(total - filled, <int64_t>self._nodes[node].num_pages)
            self._drop_tail(node, <int32_t>k, &view[filled])
            filled += k
        return pages

    def reset(self):
        """Empty the tree and return all its pages, int32 [total_pages]; handles become stale.

        Raises RuntimeError, changing nothing, while any page is locked.
        """
        if self._locked:
            raise RuntimeError(
                f"cannot reset: {self._locked} pages are locked by running requests; "
                "unlock them first"
            )
        return self.evict(self._evictable)

    def pages(self, bint locked=False):
        """All pages held, or the locked ones: int32[n] in an arbitrary, reproducible order."""
        cdef int32_t node, i
        cdef Py_ssize_t filled = 0
        pages = np.empty(self._locked + (0 if locked else self._evictable), np.int32)
        cdef int32_t[::1] view = pages
        for node in range(1, self._used):
            if self._nodes[node].state == State.NODE and (self._nodes[node].refs or not locked):
                for i in range(self._nodes[node].num_pages):
                    view[filled] = self._nodes[node].pages[i]
                    filled += 1
        return pages

    def check(self):
        """Raise AssertionError with the reason when an invariant of the tree fails. O(nodes)."""
        cdef int32_t node
        cdef int64_t locked = 0, unlocked = 0, nodes = 0
        age = self._check_recency()
        children = [0] * self._used
        refs = [0] * self._used
        for node in range(1, self._used):
            if self._nodes[node].state == State.NODE:
                self._check_node(node, age)
                nodes += 1
                children[self._nodes[node].parent] += 1
                refs[self._nodes[node].parent] += self._nodes[node].refs
                if self._nodes[node].refs:
                    locked += self._nodes[node].num_pages
                else:
                    unlocked += self._nodes[node].num_pages
        for node in range(1, self._used):
            if self._nodes[node].state == State.UNUSED:
                continue
            if self._nodes[node].children != children[node]:
                raise AssertionError(f"node {node} has {children[node]} children, not as counted")
            if self._nodes[node].state == State.ROOT:
                if not children[node] or self._roots.get(self._names.get(node)) != node:
                    raise AssertionError(f"root {node} is empty or belongs to no namespace")
            elif self._nodes[node].refs != refs[node] + self._nodes[node].own:
                raise AssertionError(f"node {node} has {self._nodes[node].refs} locks, not the sum")
        if (locked, unlocked, nodes) != (self._locked, self._evictable, self._node_count):
            raise AssertionError(
                f"{self._locked} locked pages, {self._evictable} evictable and {self._node_count} "
                f"nodes are counted but {locked}, {unlocked} and {nodes} are there"
            )
        held, times = np.unique(self.pages(), return_counts=True)
        if (times > 1).any():
            raise AssertionError(f"page {held[times.argmax()]} is held twice")

    cdef list _check_recency(self):
        """Place of each node in the recency list, -1 for those not in it."""
        cdef int32_t node = self._nodes[0].next, prev = 0, place = 0
        age = [-1] * self._used
        while node:
            if self._nodes[node].state != State.NODE or self._nodes[node].refs:
                raise AssertionError(f"node {node} is in the recency list but locked or unused")
            if self._nodes[node].prev != prev or age[node] >= 0:
                raise AssertionError(f"the recency list is broken at node {node}")
            age[node] = place
            place += 1
            prev = node
            node = self._nodes[node].next
        if self._nodes[0].prev != prev:
            raise AssertionError("the recency list does not end at its last node")
        return age

    cdef int _check_node(self, int32_t node, list age) except -1:
        cdef Node *n = &self._nodes[node]
        cdef int32_t i
        if n.num_pages < 1 or not 0 < n.parent < self._used:
            raise AssertionError(f"node {node} has no pages or no parent")
        if self._nodes[n.parent].state == State.UNUSED:
            raise AssertionError(f"node {node} has the unused parent {n.parent}")
        if self._find(n.parent, n.tokens) != node:
            raise AssertionError(f"node {node} cannot be found under its parent {n.parent}")
        for i in range(n.num_pages):
            if n.pages[i] < 1:
                raise AssertionError(f"node {node} holds page {n.pages[i]}")
        if n.own < 0 or n.refs < n.own:
            raise AssertionError(f"node {node} has {n.own} own locks of {n.refs}")
        if (n.refs == 0) != (age[node] >= 0):
            raise AssertionError(f"node {node} is unlocked but not in the recency list")
        if n.refs == 0 and self._nodes[n.parent].refs == 0:
            if self._nodes[n.parent].state == State.NODE and age[n.parent] <= age[node]:
                raise AssertionError(f"node {node} is more recent than its parent {n.parent}")
        return 0

    def corrupt_for_test(self, str kind):
        """Damage the state so that a test can see `check` notice.

        Needs node 2, under root 1, to be an unlocked node that has an unlocked child: insert A,
        then a prefix of A, then more. Kinds: "token", "page", "sink", "empty", "refs", "own",
        "children", "parent", "recency", "lost", "evictable", "nodes", "root".
        """
        cdef Node *n = &self._nodes[2]
        if self._used < 4 or n.state != State.NODE or n.refs or self._nodes[0].next == 0:
            raise ValueError("corrupt_for_test needs two unlocked nodes")
        if kind == "token":
            n.tokens[0] += 1
        elif kind == "page":
            n.pages[0] = self._nodes[3].pages[0]
        elif kind == "sink":
            n.pages[0] = 0
        elif kind == "empty":
            n.num_pages = 0
        elif kind == "refs":
            n.refs = 1
        elif kind == "own":
            n.own = 1
        elif kind == "children":
            n.children += 1
        elif kind == "parent":
            n.parent = self._used
        elif kind == "recency":
            self._unlink(2)
            self._link_after(2, 0 if self._nodes[0].next != 2 else self._nodes[0].prev)
        elif kind == "lost":
            self._unlink(2)
        elif kind == "evictable":
            self._evictable += 1
        elif kind == "nodes":
            self._node_count += 1
        elif kind == "root":
            self._names[1] = "another"
        else:
            raise ValueError(f"unknown kind of damage {kind!r}")
