# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Node storage of the n-gram trie: slabs, (parent, token) table, sibling order, LRU, eviction.

The LRU list holds every leaf, and inner nodes only while their last touch is newer than that of
their children. Touching a child unlinks the parent, a node whose last child is evicted returns at
the tail: so the victim is always the leaf whose subtree was touched longest ago, in O(1) a touch.
"""
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from .draft_tree cimport BFS, Child

cdef extern from *:
    """
    #include <stdlib.h>
    #include <sys/mman.h>
    #define OUTRIDER_PREFETCH(address) __builtin_prefetch(address)
    static void *outrider_pages(size_t bytes) {
        /* huge pages: the walk over a large trie is bound by TLB misses */
        const size_t huge = (size_t)1 << 21;
        void *block = NULL;
        if (bytes < huge) return malloc(bytes);
        bytes = (bytes + huge - 1) & ~(huge - 1);
        if (posix_memalign(&block, huge, bytes)) return NULL;
    #ifdef MADV_HUGEPAGE
        madvise(block, bytes, MADV_HUGEPAGE);
    #endif
        return block;
    }
    """
    void prefetch "OUTRIDER_PREFETCH"(void* address) noexcept nogil
    void* pages "outrider_pages"(size_t size) noexcept nogil

cdef enum:
    UNLINKED = -1       # Node.newer of a node outside the LRU list
    EMPTIED = -2        # Node.newer of a root in the chain of emptied roots
    MAX_FREQ = 0x7FFFFFFF
    TOP_SIZE = 32       # a TopList keeps this many children ...
    TOP_FROM = 64       # ... of nodes that have more than this many


cdef struct Node:       # 48 bytes; id 0 is the sentinel of the LRU list and means "none" elsewhere
    int token
    int parent          # 0 for a root
    int freq            # touches since creation, saturating
    unsigned int version  # raised on release, so that a kept (id, version) is seen to be stale
    int first_child     # children by recency, newest first
    int next_sibling    # also chains free nodes
    int prev_sibling
    int newer           # LRU links
    int older           # also chains emptied roots
    int top             # TopList of this node, 0 = none
    long long child_freq  # sum of the children's freq


cdef struct Slot:
    unsigned int hash
    int child           # 0 = empty


cdef struct TopList:    # exact best `count` children by (freq desc, token asc)
    int count           # of a free list: the next free one
    int ids[32]
    int freqs[32]
    int tokens[32]


cdef struct Pool:
    Node** slabs
    int slab_count
    int shift           # a slab has 1 << shift nodes
    int high            # ids below were handed out at least once
    int free            # chain of released nodes
    int free_count
    int used            # nodes that hold a token
    int capacity
    int roots
    int emptied         # chain of roots whose last child was evicted
    Slot* slots
    unsigned int mask
    TopList* tops       # [top_room], entry 0 unused
    int top_room
    int top_free
    int top_used
    long long evictions


cdef inline Node* at(Pool* pool, int id) noexcept nogil:
    return pool.slabs[id >> pool.shift] + (id & ((1 << pool.shift) - 1))


# The (parent, token) table: open addressing, linear probing, the full hash kept in the slot so
# that neither growth nor deletion has to visit nodes.

cdef inline unsigned int edge_hash(int parent, int token) noexcept nogil:
    cdef unsigned long long key = (<unsigned long long>parent << 32) | <unsigned int>token
    key *= 0x9E3779B97F4A7C15ULL
    key ^= key >> 32
    key *= 0xD6E8FEB86659FD93ULL
    return <unsigned int>(key >> 32)


cdef inline int find_child(Pool* pool, int parent, int token, unsigned int hash) noexcept nogil:
    cdef unsigned int i = hash & pool.mask
    cdef Node* node
    while pool.slots[i].child:
        if pool.slots[i].hash == hash:
            node = at(pool, pool.slots[i].child)
            if node.parent == parent and node.token == token:
                return pool.slots[i].child
        i = (i + 1) & pool.mask
    return 0


cdef inline void table_insert(Slot* slots, unsigned int mask, Slot entry) noexcept nogil:
    cdef unsigned int i = entry.hash & mask
    while slots[i].child:
        i = (i + 1) & mask
    slots[i] = entry


cdef inline void table_remove(Pool* pool, int child, unsigned int hash) noexcept nogil:
    cdef unsigned int i = hash & pool.mask, j, home
    while pool.slots[i].child != child:
        i = (i + 1) & pool.mask
    j = i
    while True:
        j = (j + 1) & pool.mask
        if pool.slots[j].child == 0:
            break
        home = pool.slots[j].hash & pool.mask
        if ((j - home) & pool.mask) >= ((j - i) & pool.mask):
            pool.slots[i] = pool.slots[j]
            i = j
    pool.slots[i].child = 0


cdef inline int table_resize(Pool* pool, unsigned int size) noexcept nogil:
    cdef Slot* slots = <Slot*>pages(size * sizeof(Slot))
    cdef unsigned int i
    if slots == NULL:
        return -1
    memset(slots, 0, size * sizeof(Slot))
    if pool.slots != NULL:
        for i in range(pool.mask + 1):
            if pool.slots[i].child:
                table_insert(slots, size - 1, pool.slots[i])
        free(pool.slots)
    pool.slots = slots
    pool.mask = size - 1
    return 0


# Slabs.

cdef inline int add_slab(Pool* pool) noexcept nogil:
    cdef size_t size = (<size_t>1 << pool.shift) * sizeof(Node)
    cdef void* block = realloc(pool.slabs, (pool.slab_count + 1) * sizeof(Node*))
    if block == NULL:
        return -1
    pool.slabs = <Node**>block
    pool.slabs[pool.slab_count] = <Node*>pages(size)
    if pool.slabs[pool.slab_count] == NULL:
        return -1
    memset(pool.slabs[pool.slab_count], 0, size)
    pool.slab_count += 1
    return 0


cdef inline int pool_reserve(Pool* pool, int nodes) noexcept nogil:
    """Makes room for `nodes` more nodes and table entries; -1 when memory is short."""
    cdef long long spare
    while True:
        spare = pool.free_count + (<long long>pool.slab_count << pool.shift) - pool.high
        if spare >= nodes:
            break
        if add_slab(pool) < 0:
            return -1
    while (<long long>pool.used + nodes) * 5 > (<long long>pool.mask + 1) * 3:
        if table_resize(pool, (pool.mask + 1) * 2) < 0:
            return -1
    return 0


cdef inline void pool_free(Pool* pool) noexcept nogil:
    cdef int i
    for i in range(pool.slab_count):
        free(pool.slabs[i])
    free(pool.slabs)
    free(pool.slots)
    free(pool.tops)
    pool.slabs = NULL
    pool.slots = NULL
    pool.tops = NULL


cdef inline int pool_init(Pool* pool, int capacity, int shift) noexcept nogil:
    """A pool with nothing but the sentinel; -1 when memory is short."""
    memset(pool, 0, sizeof(Pool))
    pool.capacity = capacity
    pool.shift = shift
    if add_slab(pool) < 0 or table_resize(pool, 64) < 0:
        return -1
    pool.high = 1
    return 0


cdef inline int take_node(Pool* pool) noexcept nogil:
    """A node with unset links; pool_reserve has seen to it that there is one."""
    cdef int id = pool.free
    cdef Node* node
    if id:
        pool.free = at(pool, id).next_sibling
        pool.free_count -= 1
    else:
        id = pool.high
        pool.high += 1
    node = at(pool, id)
    node.first_child = 0
    node.prev_sibling = 0
    node.next_sibling = 0
    node.newer = UNLINKED
    node.top = 0
    node.child_freq = 0
    return id


cdef inline void release_node(Pool* pool, int id) noexcept nogil:
    cdef Node* node = at(pool, id)
    node.version += 1
    node.freq = 0
    node.next_sibling = pool.free
    pool.free = id
    pool.free_count += 1


cdef inline int take_root(Pool* pool) noexcept nogil:
    cdef int id = take_node(pool)
    at(pool, id).parent = 0
    at(pool, id).token = -1
    pool.roots += 1
    return id


# LRU and sibling links.

cdef inline void lru_unlink(Pool* pool, Node* node) noexcept nogil:
    at(pool, node.newer).older = node.older
    at(pool, node.older).newer = node.newer
    node.newer = UNLINKED


cdef inline void lru_link(Pool* pool, int id, Node* node, bint newest) noexcept nogil:
    cdef Node* sentinel = at(pool, 0)
    if newest:
        node.newer = 0
        node.older = sentinel.older
        at(pool, node.older).newer = id
        sentinel.older = id
    else:
        node.older = 0
        node.newer = sentinel.newer
        at(pool, node.newer).older = id
        sentinel.newer = id


cdef inline void sibling_unlink(Pool* pool, Node* parent, Node* node) noexcept nogil:
    if node.prev_sibling:
        at(pool, node.prev_sibling).next_sibling = node.next_sibling
    else:
        parent.first_child = node.next_sibling
    if node.next_sibling:
        at(pool, node.next_sibling).prev_sibling = node.prev_sibling


cdef inline void sibling_link(Pool* pool, Node* parent, int id, Node* node) noexcept nogil:
    node.prev_sibling = 0
    node.next_sibling = parent.first_child
    if parent.first_child:
        at(pool, parent.first_child).prev_sibling = id
    parent.first_child = id


# Frequency order. Nodes with many children keep their best ones at hand: a frequency only grows
# by one touch at a time, so the list stays exact without a look at the other children.

cdef inline bint ranks_before(int freq, int token, int other_freq, int other_token) noexcept nogil:
    return freq > other_freq or (freq == other_freq and token < other_token)


cdef inline void top_set(TopList* top, int i, int id, Node* node) noexcept nogil:
    top.ids[i] = id
    top.freqs[i] = node.freq
    top.tokens[i] = node.token


cdef inline void top_raise(TopList* top, int id, Node* node) noexcept nogil:
    """Puts a child whose freq just grew where it belongs."""
    cdef int i = 0
    while i < top.count and top.ids[i] != id:
        i += 1
    if i == top.count:
        if i == 0 or not ranks_before(
            node.freq, node.token, top.freqs[i - 1], top.tokens[i - 1]
        ):
            return
        if top.count < TOP_SIZE:
            top.count += 1
        else:
            i -= 1
    while i > 0 and ranks_before(node.freq, node.token, top.freqs[i - 1], top.tokens[i - 1]):
        top.ids[i] = top.ids[i - 1]
        top.freqs[i] = top.freqs[i - 1]
        top.tokens[i] = top.tokens[i - 1]
        i -= 1
    top_set(top, i, id, node)


cdef inline void top_remove(TopList* top, int id) noexcept nogil:
    cdef int i = 0
    while i < top.count and top.ids[i] != id:
        i += 1
    if i == top.count:
        return
    top.count -= 1
    while i < top.count:
        top.ids[i] = top.ids[i + 1]
        top.freqs[i] = top.freqs[i + 1]
        top.tokens[i] = top.tokens[i + 1]
        i += 1


cdef inline void top_release(Pool* pool, Node* node) noexcept nogil:
    pool.tops[node.top].count = pool.top_free
    pool.top_free = node.top
    pool.top_used -= 1
    node.top = 0


cdef inline int top_take(Pool* pool) noexcept nogil:
    """A free list's index; 0 when memory is short (the caller then goes without)."""
    cdef int i, room
    cdef void* block
    if pool.top_free == 0:
        room = max(16, pool.top_room * 2)
        block = realloc(pool.tops, room * sizeof(TopList))
        if block == NULL:
            return 0
        pool.tops = <TopList*>block
        for i in range(max(1, pool.top_room), room):
            pool.tops[i].count = pool.top_free
            pool.top_free = i
        pool.top_room = room
    i = pool.top_free
    pool.top_free = pool.tops[i].count
    pool.top_used += 1
    return i


cdef inline int top_scan(Pool* pool, Node* parent, int k, Child* out, int* children) noexcept nogil:
    """The k best of all children by (freq desc, token asc); `children` is how many there are."""
    cdef int id = parent.first_child, found = 0, i
    cdef Node* node
    children[0] = 0
    while id:
        node = at(pool, id)
        children[0] += 1
        i = found
        if found < k:
            found += 1
        elif ranks_before(node.freq, node.token, out[k - 1].freq, out[k - 1].token):
            i = k - 1
        else:
            i = -1
        if i >= 0:
            while i > 0 and ranks_before(node.freq, node.token, out[i - 1].freq, out[i - 1].token):
                out[i] = out[i - 1]
                i -= 1
            out[i].node = id
            out[i].token = node.token
            out[i].freq = node.freq
        id = node.next_sibling
    return found


cdef inline int top_by_freq(Pool* pool, Node* parent, int k, Child* out) noexcept nogil:
    cdef Child best[32]
    cdef int children, found, i
    cdef TopList* top
    if k > TOP_SIZE:
        return top_scan(pool, parent, k, out, &children)
    if parent.top == 0 or pool.tops[parent.top].count < k:
        found = top_scan(pool, parent, TOP_SIZE, best, &children)
        if children <= TOP_FROM:
            if parent.top:
                top_release(pool, parent)
        elif parent.top == 0:
            parent.top = top_take(pool)
        if parent.top:
            top = &pool.tops[parent.top]
            top.count = found
            for i in range(found):
                top_set(top, i, best[i].node, at(pool, best[i].node))
        found = min(found, k)
        for i in range(found):
            out[i] = best[i]
        return found
    top = &pool.tops[parent.top]
    for i in range(k):
        out[i].node = top.ids[i]
        out[i].token = top.tokens[i]
        out[i].freq = top.freqs[i]
    return k


cdef inline int top_children(
    void* source, int id, int k, int match_type, Child* out, double* total
) noexcept nogil:
    """`TopChildren` of a trie."""
    cdef Pool* pool = <Pool*>source
    cdef Node* parent = at(pool, id)
    cdef Node* node
    cdef int found = 0
    total[0] = <double>parent.child_freq
    if match_type != BFS:
        return top_by_freq(pool, parent, k, out)
    id = parent.first_child
    while id and found < k:
        node = at(pool, id)
        out[found].node = id
        out[found].token = node.token
        out[found].freq = node.freq
        found += 1
        id = node.next_sibling
    return found


# Touching, creating, evicting.

cdef inline void raise_freq(Pool* pool, Node* parent, int id, Node* node) noexcept nogil:
    if node.freq < MAX_FREQ:
        node.freq += 1
        parent.child_freq += 1
    if parent.top:
        top_raise(&pool.tops[parent.top], id, node)


cdef inline void touch_child(Pool* pool, int parent_id, int id) noexcept nogil:
    cdef Node* parent = at(pool, parent_id)
    cdef Node* node = at(pool, id)
    raise_freq(pool, parent, id, node)
    if node.prev_sibling:
        sibling_unlink(pool, parent, node)
        sibling_link(pool, parent, id, node)
    if node.newer >= 0:
        lru_unlink(pool, node)
    lru_link(pool, id, node, True)
    if parent.newer >= 0:
        lru_unlink(pool, parent)


cdef inline void evict_leaf(Pool* pool) noexcept nogil:
    cdef int id = at(pool, 0).newer, parent_id
    cdef Node* node = at(pool, id)
    cdef Node* parent
    while node.first_child:
        lru_unlink(pool, node)
        id = at(pool, 0).newer
        node = at(pool, id)
    lru_unlink(pool, node)
    parent_id = node.parent
    parent = at(pool, parent_id)
    table_remove(pool, id, edge_hash(parent_id, node.token))
    sibling_unlink(pool, parent, node)
    parent.child_freq -= node.freq
    if parent.top:
        top_remove(&pool.tops[parent.top], id)
    release_node(pool, id)
    pool.used -= 1
    pool.evictions += 1
    if parent.first_child == 0:
        if parent.top:
            top_release(pool, parent)
        if parent.parent == 0:
            if parent.newer == UNLINKED:
                parent.newer = EMPTIED
                parent.older = pool.emptied
                pool.emptied = parent_id
        elif parent.newer == UNLINKED:
            lru_link(pool, parent_id, parent, False)


cdef inline int create_child(
    Pool* pool, int parent_id, int token, unsigned int hash
) noexcept nogil:
    cdef Node* parent = at(pool, parent_id)
    cdef Node* node
    cdef Slot entry
    # Unlinked first: the parent may be the oldest leaf and must not be its own child's victim.
    if parent.newer >= 0:
        lru_unlink(pool, parent)
    if pool.used >= pool.capacity:
        evict_leaf(pool)
    entry.child = take_node(pool)
    entry.hash = hash
    node = at(pool, entry.child)
    node.token = token
    node.parent = parent_id
    node.freq = 0
    table_insert(pool.slots, pool.mask, entry)
    pool.used += 1
    sibling_link(pool, parent, entry.child, node)
    raise_freq(pool, parent, entry.child, node)
    lru_link(pool, entry.child, node, True)
    return entry.child
