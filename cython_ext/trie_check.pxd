# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The invariants of the trie's node pool, as one walk over everything that is linked."""
from .draft_tree cimport Child
from .trie_pool cimport (
    HAS_TOP, TOP_SIZE, Node, Pool, TopList, at, find_child, freq_of, top_of, top_scan,
)


cdef inline object check_top(Pool* pool, int id):
    cdef Node* node = at(pool, id)
    cdef TopList* top = &pool.tops[top_of(pool, id)[0]]
    cdef Child best[16]
    cdef int children, found, i
    found = top_scan(pool, node, TOP_SIZE, best, &children)
    if top.count > found or top.children != children:
        return f"node {id}: its top list is of {top.children} children, it has {children}"
    for i in range(top.count):
        if top.ids[i] != best[i].node or <int>top.freqs[i] != best[i].freq:
            return f"node {id}: entry {i} of its top list is not the child of that rank"
    return None


cdef inline object check_node(Pool* pool, int id, list children):
    """Checks the links between one linked node and its children, which it appends."""
    cdef Node* node = at(pool, id)
    cdef Node* child
    cdef int previous = 0, next = node.first_child
    while next:
        if not 0 < next < pool.high:
            return f"node {id}: sibling link to {next}, which was never handed out"
        if len(children) > pool.used:
            return f"node {id}: more nodes are linked than the {pool.used} in use"
        child = at(pool, next)
        if child.parent != id or child.prev_sibling != previous:
            return f"node {next}: does not link back to its parent {id} or sibling {previous}"
        if freq_of(child) < 1:
            return f"node {next}: freq {freq_of(child)}"
        if find_child(pool, id, child.token) != next:
            return f"node {next}: token {child.token} below {id} does not lead to it"
        children.append(next)
        previous = next
        next = child.next_sibling
    if node.freq & HAS_TOP:
        return check_top(pool, id)
    return None


cdef inline object check_lru(Pool* pool, set leaves):
    cdef int previous = 0, next = at(pool, 0).older
    cdef Node* node
    cdef long long steps = 0
    while next:
        if not 0 < next < pool.high or steps > pool.used:
            return f"LRU list: link to {next} behind {previous}"
        node = at(pool, next)
        if node.newer != previous or freq_of(node) < 1:
            return f"LRU list: node {next} does not link back to {previous}"
        leaves.discard(next)
        previous = next
        next = node.older
        steps += 1
    if at(pool, 0).newer != previous:
        return f"LRU list: ends with {previous}, not with {at(pool, 0).newer}"
    if leaves:
        return f"LRU list: lacks the leaf {min(leaves)}"
    return None


cdef inline object check_pool(Pool* pool, int max_depth):
    """The first broken invariant in words, None if all hold."""
    cdef int id, depth = 0, slots = 0, indexed = 0
    cdef unsigned int i
    level = []
    leaves = set()
    free_ids = set()
    id = pool.free
    while id:
        if id in free_ids:
            return f"node {id} is twice in the free list"
        free_ids.add(id)
        id = at(pool, id).next_sibling
    if len(free_ids) != pool.free_count:
        return f"{len(free_ids)} nodes are free, free_count is {pool.free_count}"
    for id in range(1, pool.high):
        if at(pool, id).parent == 0 and at(pool, id).token == -1 and id not in free_ids:
            level.append(id)
    if len(level) != pool.roots:
        return f"{len(level)} roots exist, {pool.roots} are counted"
    linked = 0
    while level:
        children = []
        for id in level:
            if depth and at(pool, id).first_child == 0:
                leaves.add(id)
            known = len(children)
            problem = check_node(pool, id, children)
            if problem is not None:
                return problem
            if len(children) > known + 1:
                indexed += <int>len(children) - <int>known
        linked += len(children)
        level = children
        depth += 1
    if depth - 1 > max_depth:
        return f"a path has {depth - 1} tokens, max_depth is {max_depth}"
    if linked != pool.used or pool.used > pool.capacity:
        return f"{linked} nodes are linked, {pool.used} are counted, capacity {pool.capacity}"
    if linked + pool.roots + len(free_ids) + 1 != pool.high:
        return f"{pool.high} nodes were handed out, some are neither linked nor free"
    for i in range(pool.mask + 1):
        if pool.slots[i].child:
            slots += 1
    if slots != indexed or slots != pool.indexed:
        return f"the table has {slots} entries, counts {pool.indexed}, needs {indexed}"
    return check_lru(pool, leaves)
