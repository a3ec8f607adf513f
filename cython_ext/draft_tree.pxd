# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Token trees of one draft: grown from ranked continuations, merged by path, written breadth-first.

Shared by the n-gram trie and the suffix automaton: both only supply `TopChildren`.
"""
from libc.math cimport floor
from libc.stdlib cimport free, realloc

cdef enum:
    BFS = 0
    PROB = 1


cdef struct TreeNode:
    int token
    int first           # children in rank order, 0 = none
    int last
    int next
    float weight        # estimated probability that this node is accepted


cdef struct Child:
    int node            # of the source (trie node or automaton state)
    int token
    int freq


cdef struct Pending:    # one entry of the BFS queue
    int index
    int node
    double breadth


cdef struct Candidate:  # one entry of the PROB heap
    double p
    long long sequence  # ties go to the earlier push, which is rank order
    int parent
    int node
    int token
    float share


cdef struct DraftTree:
    TreeNode* nodes     # [space + 1], node 0 is the root (bonus token)
    int* order          # [space + 1]
    Pending* queue      # [space + 2]
    Candidate* heap     # [(space + 2) * breadth]
    Child* children     # [breadth]
    int heap_size
    int count           # nodes besides the root
    int limit           # largest count of the current row
    int space
    int breadth


# Writes the k best children of `node` (recency order for BFS, frequency order for PROB) and
# the frequency of `node` itself; returns how many were written.
ctypedef int (*TopChildren)(
    void* source, int node, int k, int match_type, Child* out, double* total
) noexcept nogil


cdef inline int check_shape(
    str name, Py_ssize_t rows, Py_ssize_t columns, Py_ssize_t want_rows, Py_ssize_t want_columns
) except -1:
    if rows != want_rows or columns != want_columns:
        raise ValueError(
            f"{name}: shape [{rows}, {columns}], expected [{want_rows}, {want_columns}]"
        )
    return 0


cdef inline int check_proposal(
    int match_type, int min_breadth, int max_breadth, Py_ssize_t rows, const int[::1] caps,
    int[::1] counts, int[:, ::1] tokens, int[:, ::1] parents, int[::1] match_len,
    float[:, ::1] weights,
) except -1:
    """Refuses arguments of `propose` that do not fit together; tokens' columns are the norm."""
    cdef Py_ssize_t columns = tokens.shape[1]
    check_shape("caps", caps.shape[0], 1, rows, 1)
    check_shape("counts_out", counts.shape[0], 1, rows, 1)
    check_shape("tokens_out", tokens.shape[0], columns, rows, columns)
    check_shape("parents_out", parents.shape[0], parents.shape[1], rows, columns)
    check_shape("match_len_out", match_len.shape[0], 1, rows, 1)
    check_shape("weights_out", weights.shape[0], weights.shape[1], rows, columns)
    if not 0 <= match_type <= 1:
        raise ValueError(f"match_type is {match_type}: must be 0 (BFS) or 1 (PROB)")
    if not 1 <= min_breadth <= max_breadth:
        raise ValueError(
            f"breadths are {min_breadth} and {max_breadth}: need 1 <= min_breadth <= max_breadth"
        )
    return 0


cdef inline void tree_free(DraftTree* tree) noexcept nogil:
    free(tree.nodes)
    free(tree.order)
    free(tree.queue)
    free(tree.heap)
    free(tree.children)


cdef inline int tree_reserve(DraftTree* tree, int space, int breadth) noexcept nogil:
    """Makes room for `space` nodes and fan-out `breadth`; -1 when memory is short."""
    cdef void* block
    if tree.nodes != NULL and space <= tree.space and breadth <= tree.breadth:
        return 0
    space = max(space, tree.space)
    breadth = max(breadth, tree.breadth)
    block = realloc(tree.nodes, (space + 1) * sizeof(TreeNode))
    if block == NULL:
        return -1
    tree.nodes = <TreeNode*>block
    block = realloc(tree.order, (space + 1) * sizeof(int))
    if block == NULL:
        return -1
    tree.order = <int*>block
    block = realloc(tree.queue, (space + 2) * sizeof(Pending))
    if block == NULL:
        return -1
    tree.queue = <Pending*>block
    block = realloc(tree.heap, <size_t>(space + 2) * breadth * sizeof(Candidate))
    if block == NULL:
        return -1
    tree.heap = <Candidate*>block
    block = realloc(tree.children, breadth * sizeof(Child))
    if block == NULL:
        return -1
    tree.children = <Child*>block
    tree.space = space
    tree.breadth = breadth
    return 0


cdef inline void tree_reset(DraftTree* tree, int limit) noexcept nogil:
    tree.count = 0
    tree.limit = limit
    tree.nodes[0].first = 0
    tree.nodes[0].weight = 1.0


cdef inline int tree_add(DraftTree* tree, int parent, int token, float weight) noexcept nogil:
    """Index of the parent's child with this token, made if missing; -1 when the tree is full."""
    cdef int index = tree.nodes[parent].first
    while index:
        if tree.nodes[index].token == token:
            return index
        index = tree.nodes[index].next
    if tree.count >= tree.limit:
        return -1
    tree.count += 1
    index = tree.count
    tree.nodes[index].token = token
    tree.nodes[index].first = 0
    tree.nodes[index].next = 0
    tree.nodes[index].weight = weight
    if tree.nodes[parent].first:
        tree.nodes[tree.nodes[parent].last].next = index
    else:
        tree.nodes[parent].first = index
    tree.nodes[parent].last = index
    return index


cdef inline float share_of(int freq, double total) noexcept nogil:
    """Estimated probability of a child; 1 at most, since the parent may have been made later."""
    return <float>(freq / total) if freq < total else <float>1.0


cdef inline void tree_grow_bfs(
    DraftTree* tree, void* source, TopChildren top, int node, int depth, int max_depth,
    int min_breadth, int max_breadth,
) noexcept nogil:
    """Adds continuations of one anchor of `depth` tokens; long matches fan out less."""
    cdef int span = max(1, max_depth - 1)
    cdef double scale = <double>(max_breadth - min_breadth) / span
    cdef int head = 0, tail = 1, i, k, found, index
    cdef double total
    cdef Pending item
    tree.queue[0].index = 0
    tree.queue[0].node = node
    tree.queue[0].breadth = (span - depth) * scale + min_breadth
    while head < tail and tree.count < tree.limit:
        item = tree.queue[head]
        head += 1
        k = max(1, <int>floor(item.breadth))
        found = top(source, item.node, k, BFS, tree.children, &total)
        for i in range(found):
            index = tree_add(
                tree, item.index, tree.children[i].token,
                tree.nodes[item.index].weight * share_of(tree.children[i].freq, total),
            )
            if index < 0:
                return
            tree.queue[tail].index = index
            tree.queue[tail].node = tree.children[i].node
            tree.queue[tail].breadth = item.breadth - scale
            tail += 1


cdef inline bint candidate_before(Candidate* a, Candidate* b) noexcept nogil:
    return a.p > b.p or (a.p == b.p and a.sequence < b.sequence)


cdef inline void heap_push(DraftTree* tree, Candidate item) noexcept nogil:
    cdef int i = tree.heap_size, up
    tree.heap_size += 1
    while i > 0:
        up = (i - 1) // 2
        if not candidate_before(&item, &tree.heap[up]):
            break
        tree.heap[i] = tree.heap[up]
        i = up
    tree.heap[i] = item


cdef inline Candidate heap_pop(DraftTree* tree) noexcept nogil:
    cdef Candidate best = tree.heap[0], item
    cdef int i = 0, down
    tree.heap_size -= 1
    item = tree.heap[tree.heap_size]
    while True:
        down = 2 * i + 1
        if down >= tree.heap_size:
            break
        if down + 1 < tree.heap_size and candidate_before(&tree.heap[down + 1], &tree.heap[down]):
            down += 1
        if not candidate_before(&tree.heap[down], &item):
            break
        tree.heap[i] = tree.heap[down]
        i = down
    tree.heap[i] = item
    return best


cdef inline void tree_grow_prob(
    DraftTree* tree, void* source, TopChildren top, int node, int max_breadth
) noexcept nogil:
    """Adds continuations of one anchor, most probable path first."""
    cdef int index = 0, i, found
    cdef long long sequence = 0
    cdef double p = 1.0, total, ranked
    cdef Candidate item
    tree.heap_size = 0
    while True:
        found = top(source, node, max_breadth, PROB, tree.children, &total)
        ranked = 0.0
        for i in range(found):
            ranked += tree.children[i].freq
        for i in range(found):
            item.p = tree.children[i].freq / ranked * p
            item.sequence = sequence
            item.parent = index
            item.node = tree.children[i].node
            item.token = tree.children[i].token
            item.share = share_of(tree.children[i].freq, total)
            heap_push(tree, item)
            sequence += 1
        if tree.heap_size == 0 or tree.count >= tree.limit:
            return
        item = heap_pop(tree)
        index = tree_add(
            tree, item.parent, item.token, tree.nodes[item.parent].weight * item.share
        )
        node = item.node
        p = item.p


cdef inline void tree_write(
    DraftTree* tree, int columns, int* tokens, int* parents, float* weights
) noexcept nogil:
    """Writes the nodes breadth-first, siblings in rank order; zeros behind them up to `columns`."""
    cdef int head = 0, tail = 1, index
    tree.order[0] = 0
    while head < tail:
        index = tree.nodes[tree.order[head]].first
        while index:
            tree.order[tail] = index
            tokens[tail - 1] = tree.nodes[index].token
            parents[tail - 1] = head
            weights[tail - 1] = tree.nodes[index].weight
            tail += 1
            index = tree.nodes[index].next
        head += 1
    for index in range(tail - 1, columns):
        tokens[index] = 0
        parents[index] = 0
        weights[index] = 0.0
