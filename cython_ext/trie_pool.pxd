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
    #define OUTRIDER_MAX_FREQ 0x7FFFFFFFu
    #define OUTRIDER_HAS_TOP 0x80000000u
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
    const unsigned int MAX_FREQ "OUTRIDER_MAX_FREQ"
    const unsigned int HAS_TOP "OUTRIDER_HAS_TOP"
    void prefetch "OUTRIDER_PREFETCH"(void* address) noexcept nogil
    void* pages "outrider_pages"(size_t size) noexcept nogil

cdef enum:
    UNLINKED = -1       # Node.newer of a node outside the LRU list
    EMPTIED = -2        # Node.newer of a root in the chain of emptied roots
    TOP_SIZE = 16       # a TopList keeps up to this many children ...
    TOP_FROM = 4        # ... of nodes that have more than this many


cdef struct Node:       # 32 bytes; id 0 is the sentinel of the LRU list and means "none" elsewhere
    int token
    int parent          # 0 for a root
    unsigned int freq   # touches since creation, saturating; HAS_TOP above them
    int first_child     # children by recency, newest first
    int next_sibling    # also chains free nodes
    int prev_sibling
    int newer           # LRU links
    int older           # also chains emptied roots


cdef struct Slot:
    unsigned int hash
    int child           # 0 = empty


cdef struct TopList:    # exact best `count` children by (freq desc, token asc)
    int count           # of a free list: the next free one
    int children        # of the node; equal to count: the list has them all
    int ids[16]
    unsigned int freqs[16]
    int tokens[16]


cdef struct Pool:
    # A slab has 1 << shift nodes, behind them what is rarely read: released and top of each.
    Node** slabs
    int slab_count
    int shift
    int high            # ids below were handed out at least once
    int free            # chain of released nodes
    int free_count
    int used            # nodes that hold a token
    int capacity
    int roots
    int emptied         # chain of roots whose last child was evicted
    Slot* slots
    unsigned int mask
    int indexed         # nodes in the table
    TopList* tops       # [top_room], entry 0 unused
    int top_room
    int top_free
    int top_used
    long long evictions
    int scout           # a node that will be evicted soon; only a hint


cdef inline Node* at(Pool* pool, int id) noexcept nogil:
    return pool.slabs[id >> pool.shift] + (id & ((1 << pool.shift) - 1))


cdef inline long long* released(Pool* pool, int id) noexcept nogil:
    """Value of `evictions` when the id was last released: a reference from before is stale."""
    cdef int size = 1 << pool.shift
    return <long long*>(pool.slabs[id >> pool.shift] + size) + (id & (size - 1))


cdef inline int* top_of(Pool* pool, int id) noexcept nogil:
    """The TopList of a node that has HAS_TOP."""
    cdef int size = 1 << pool.shift
    return (
        <int*>(<long long*>(pool.slabs[id >> pool.shift] + size) + size) + (id & (size - 1))
    )


cdef inline size_t slab_bytes(int shift) noexcept nogil:
    return (sizeof(Node) + sizeof(long long) + sizeof(int)) << shift


cdef inline unsigned int freq_of(Node* node) noexcept nogil:
    return node.freq & MAX_FREQ


# The (parent, token) table: open addressing, linear probing, the full hash kept in the slot so
# that growth has to visit no node. It holds the children of nodes that have two or more: an only
# child is found through its parent, and most nodes are only children.

cdef inline unsigned int edge_hash(int parent, int token) noexcept nogil:
    cdef unsigned long long key = (<unsigned long long>parent << 32) | <unsigned int>token
    key *= 0x9E3779B97F4A7C15ULL
    key ^= key >> 32
    key *= 0xD6E8FEB86659FD93ULL
    return <unsigned int>(key >> 32)


cdef inline int find_child(Pool* pool, int parent, int token) noexcept nogil:
    """The child of a node, 0 if it has none with this token."""
    cdef int id = at(pool, parent).first_child
    cdef Node* node = at(pool, id)
    cdef unsigned int hash, i
    if id == 0 or node.token == token:
        return id
    if node.next_sibling == 0:
        return 0
    hash = edge_hash(parent, token)
    i = hash & pool.mask
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


cdef inline void table_add(Pool* pool, int child) noexcept nogil:
    cdef Slot entry
    entry.hash = edge_hash(at(pool, child).parent, at(pool, child).token)
    entry.child = child
    table_insert(pool.slots, pool.mask, entry)
    pool.indexed += 1


cdef inline void table_remove(Pool* pool, int child) noexcept nogil:
    cdef unsigned int i = edge_hash(at(pool, child).parent, at(pool, child).token) & pool.mask
    cdef unsigned int j, home
    pool.indexed -= 1
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
    cdef void* block = realloc(pool.slabs, (pool.slab_count + 1) * sizeof(Node*))
    if block == NULL:
        return -1
    pool.slabs = <Node**>block
    pool.slabs[pool.slab_count] = <Node*>pages(slab_bytes(pool.shift))
    if pool.slabs[pool.slab_count] == NULL:
        return -1
    pool.slab_count += 1
    return 0


cdef inline int pool_reserve(Pool* pool, int nodes, int entries) noexcept nogil:
    """Makes room for more nodes and table entries; -1 when memory is short."""
    cdef long long spare
    while True:
        spare = pool.free_count + (<long long>pool.slab_count << pool.shift) - pool.high
        if spare >= nodes:
            break
        if add_slab(pool) < 0:
            return -1
    while (<long long>pool.indexed + entries) * 5 > (<long long>pool.mask + 1) * 3:
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
    memset(at(pool, 0), 0, sizeof(Node))
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
        released(pool, id)[0] = 0
    node = at(pool, id)
    node.freq = 0
    node.first_child = 0
    node.prev_sibling = 0
    node.next_sibling = 0
    node.newer = UNLINKED
    return id


cdef inline void release_node(Pool* pool, int id) noexcept nogil:
    cdef Node* node = at(pool, id)
    released(pool, id)[0] = pool.evictions
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

cdef inline bint ranks_before(
    unsigned int freq, int token, unsigned int other_freq, int other_token
) noexcept nogil:
    return freq > other_freq or (freq == other_freq and token < other_token)


cdef inline void top_set(TopList* top, int i, int id, Node* node) noexcept nogil:
    top.ids[i] = id
    top.freqs[i] = freq_of(node)
    top.tokens[i] = node.token


cdef inline void top_raise(TopList* top, int id, Node* node) noexcept nogil:
    """Puts a child whose freq just grew where it belongs."""
    cdef int i = 0
    cdef unsigned int freq = freq_of(node)
    cdef bint beats_last
    while i < top.count and top.ids[i] != id:
        i += 1
    if i == top.count:
        beats_last = i > 0 and ranks_before(
            freq, node.token, top.freqs[i - 1], top.tokens[i - 1]
        )
        if top.count < TOP_SIZE and (beats_last or top.count == top.children - 1):
            top.count += 1
        elif beats_last:
            i -= 1
        else:
            return
    while i > 0 and ranks_before(freq, node.token, top.freqs[i - 1], top.tokens[i - 1]):
        top.ids[i] = top.ids[i - 1]
        top.freqs[i] = top.freqs[i - 1]
        top.tokens[i] = top.tokens[i - 1]
        i -= 1
    top_set(top, i, id, node)


cdef inline void top_remove(TopList* top, int id) noexcept nogil:
    cdef int i = 0
    top.children -= 1
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


cdef inline void top_release(Pool* pool, int id) noexcept nogil:
    cdef int top = top_of(pool, id)[0]
    pool.tops[top].count = pool.top_free
    pool.top_free = top
    pool.top_used -= 1
    at(pool, id).freq &= MAX_FREQ


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
    cdef int freq
    children[0] = 0
    while id:
        node = at(pool, id)
        freq = freq_of(node)
        children[0] += 1
        i = found
        if found < k:
            found += 1
        elif ranks_before(freq, node.token, out[k - 1].freq, out[k - 1].token):
            i = k - 1
        else:
            i = -1
        if i >= 0:
            while i > 0 and ranks_before(freq, node.token, out[i - 1].freq, out[i - 1].token):
                out[i] = out[i - 1]
                i -= 1
            out[i].node = id
            out[i].token = node.token
            out[i].freq = freq
        id = node.next_sibling
    return found


cdef inline int top_by_freq(Pool* pool, int id, Node* parent, int k, Child* out) noexcept nogil:
    cdef Child best[16]
    cdef int children, found, i
    cdef TopList* top = NULL
    if k > TOP_SIZE:
        return top_scan(pool, parent, k, out, &children)
    if parent.freq & HAS_TOP:
        top = &pool.tops[top_of(pool, id)[0]]
    if top == NULL or top.count < min(k, top.children):
        found = top_scan(pool, parent, TOP_SIZE, best, &children)
        if children <= TOP_FROM:
            if top != NULL:
                top_release(pool, id)
        elif top == NULL:
            i = top_take(pool)
            if i:
                top_of(pool, id)[0] = i
                parent.freq |= HAS_TOP
        if parent.freq & HAS_TOP:
            top = &pool.tops[top_of(pool, id)[0]]
            top.count = found
            top.children = children
            for i in range(found):
                top_set(top, i, best[i].node, at(pool, best[i].node))
        found = min(found, k)
        for i in range(found):
            out[i] = best[i]
        return found
    k = min(k, top.count)
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
    total[0] = freq_of(parent)
    if match_type != BFS:
        return top_by_freq(pool, id, parent, k, out)
    id = parent.first_child
    while id and found < k:
        node = at(pool, id)
        out[found].node = id
        out[found].token = node.token
        out[found].freq = freq_of(node)
        prefetch(at(pool, node.first_child))
        found += 1
        id = node.next_sibling
    return found


cdef inline void prefetch_touch(Pool* pool, Node* parent, int parent_id, int token) noexcept nogil:
    """Fetches what the push of `token` below a node will read and write; its first child is here.

    The first child is the most recent one and most often the one that comes again.
    """
    cdef Node* node = at(pool, parent.first_child)
    if node.token != token:
        if node.next_sibling:
            prefetch(pool.slots + (edge_hash(parent_id, token) & pool.mask))
    elif node.newer >= 0:
        prefetch(at(pool, node.newer))
        prefetch(at(pool, node.older))


# Touching, creating, evicting.

cdef inline void raise_freq(
    Pool* pool, int parent_id, Node* parent, int id, Node* node
) noexcept nogil:
    if freq_of(node) < MAX_FREQ:
        node.freq += 1
    if parent.freq & HAS_TOP:
        top_raise(&pool.tops[top_of(pool, parent_id)[0]], id, node)


cdef inline void touch_child(Pool* pool, int parent_id, int id) noexcept nogil:
    cdef Node* parent = at(pool, parent_id)
    cdef Node* node = at(pool, id)
    raise_freq(pool, parent_id, parent, id, node)
    if node.prev_sibling:
        sibling_unlink(pool, parent, node)
        sibling_link(pool, parent, id, node)
    if node.newer >= 0:
        lru_unlink(pool, node)
    lru_link(pool, id, node, True)
    if parent.newer >= 0:
        lru_unlink(pool, parent)


cdef inline void scout_victims(Pool* pool, bint same_path) noexcept nogil:
    """Fetches, one path ahead, what evictions will need: victims mostly follow one path upwards."""
    cdef Node* node
    if same_path:
        node = at(pool, pool.scout)
        if node.prev_sibling or node.next_sibling:
            prefetch(pool.slots + (edge_hash(node.parent, node.token) & pool.mask))
        pool.scout = node.parent
    else:
        pool.scout = max(0, at(pool, at(pool, 0).newer).newer)
    prefetch(at(pool, pool.scout))
    prefetch(released(pool, pool.scout))


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
    if node.prev_sibling or node.next_sibling:
        table_remove(pool, id)
        sibling_unlink(pool, parent, node)
        if at(pool, parent.first_child).next_sibling == 0:
            table_remove(pool, parent.first_child)
    else:
        parent.first_child = 0
    if parent.freq & HAS_TOP:
        top_remove(&pool.tops[top_of(pool, parent_id)[0]], id)
    pool.evictions += 1
    release_node(pool, id)
    pool.used -= 1
    if parent.first_child == 0:
        if parent.freq & HAS_TOP:
            top_release(pool, parent_id)
        if parent.parent == 0:
            if parent.newer == UNLINKED:
                parent.newer = EMPTIED
                parent.older = pool.emptied
                pool.emptied = parent_id
        elif parent.newer == UNLINKED:
            lru_link(pool, parent_id, parent, False)
    scout_victims(pool, at(pool, 0).newer == parent_id)


cdef inline int create_child(Pool* pool, int parent_id, int token) noexcept nogil:
    cdef Node* parent = at(pool, parent_id)
    cdef Node* node
    cdef int id
    # Unlinked first: the parent may be the oldest leaf and must not be its own child's victim.
    if parent.newer >= 0:
        lru_unlink(pool, parent)
    if pool.used >= pool.capacity:
        evict_leaf(pool)
    id = take_node(pool)
    node = at(pool, id)
    node.token = token
    node.parent = parent_id
    if parent.first_child:
        if at(pool, parent.first_child).next_sibling == 0:
            table_add(pool, parent.first_child)
        table_add(pool, id)
    pool.used += 1
    sibling_link(pool, parent, id, node)
    if parent.freq & HAS_TOP:
        pool.tops[top_of(pool, parent_id)[0]].children += 1
    raise_freq(pool, parent_id, parent, id, node)
    lru_link(pool, id, node, True)
    return id
