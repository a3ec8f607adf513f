# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""The suffix automaton of an external corpus: every substring's continuations, built once."""
from cython cimport final
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memset

from .draft_tree cimport (
    PROB, Child, check_proposal, check_shape, tree_free, tree_grow_bfs, tree_grow_prob,
    tree_reserve, tree_reset, tree_write,
)

cdef enum:
    SEPARATOR = -0x7FFFFFFF - 1
    MAX_TOKENS = 1 << 29        # 3 edges a token still fit an int


cdef struct Ranked:
    unsigned long long key
    int edge


cdef unsigned int edge_hash(int state, int token) noexcept nogil:
    cdef unsigned long long key = (<unsigned long long>state << 32) | <unsigned int>token
    key *= 0x9E3779B97F4A7C15ULL
    key ^= key >> 32
    key *= 0xD6E8FEB86659FD93ULL
    return <unsigned int>(key >> 32)


cdef int find_edge(Automaton* a, int state, int token) noexcept nogil:
    cdef unsigned int hash = edge_hash(state, token)
    cdef unsigned int i = hash & a.mask
    cdef Edge* edge
    while a.slots[i].edge:
        if a.slots[i].hash == hash:
            edge = &a.edge[a.slots[i].edge - 1]
            if edge.state == state and edge.token == token:
                return a.slots[i].edge - 1
        i = (i + 1) & a.mask
    return -1


cdef void insert_slot(EdgeSlot* slots, unsigned int mask, EdgeSlot entry) noexcept nogil:
    cdef unsigned int i = entry.hash & mask
    while slots[i].edge:
        i = (i + 1) & mask
    slots[i] = entry


cdef int resize_table(Automaton* a, unsigned int size) noexcept nogil:
    cdef EdgeSlot* slots = <EdgeSlot*>calloc(size, sizeof(EdgeSlot))
    cdef unsigned int i
    if slots == NULL:
        return -1
    if a.slots != NULL:
        for i in range(a.mask + 1):
            if a.slots[i].edge:
                insert_slot(slots, size - 1, a.slots[i])
        free(a.slots)
    a.slots = slots
    a.mask = size - 1
    return 0


cdef int grow(void** block, size_t size) noexcept nogil:
    cdef void* moved = realloc(block[0], size)
    if moved == NULL:
        return -1
    block[0] = moved
    return 0


cdef int add_state(Automaton* a, int length, int occurrences, int end) noexcept nogil:
    cdef int room
    if a.states == a.state_room:
        room = max(64, a.state_room + a.state_room // 2)
        if (
            grow(<void**>&a.length, room * sizeof(int)) < 0
            or grow(<void**>&a.link, room * sizeof(int)) < 0
            or grow(<void**>&a.occurrences, room * sizeof(int)) < 0
            or grow(<void**>&a.end, room * sizeof(int)) < 0
            or grow(<void**>&a.first_edge, room * sizeof(int)) < 0
        ):
            return -1
        a.state_room = room
    a.length[a.states] = length
    a.link[a.states] = -1
    a.occurrences[a.states] = occurrences
    a.end[a.states] = end
    a.first_edge[a.states] = -1
    a.states += 1
    return a.states - 1


cdef int add_edge(Automaton* a, int state, int token, int target) noexcept nogil:
    cdef EdgeSlot entry
    cdef int room
    if a.edges == a.edge_room:
        room = max(64, a.edge_room + a.edge_room // 2)
        if grow(<void**>&a.edge, room * sizeof(Edge)) < 0:
            return -1
        a.edge_room = room
    if (<long long>a.edges + 1) * 5 > (<long long>a.mask + 1) * 3:
        if resize_table(a, (a.mask + 1) * 2) < 0:
            return -1
    a.edge[a.edges].state = state
    a.edge[a.edges].token = token
    a.edge[a.edges].target = target
    a.edge[a.edges].next = a.first_edge[state]
    a.first_edge[state] = a.edges
    a.edges += 1
    entry.hash = edge_hash(state, token)
    entry.edge = a.edges
    insert_slot(a.slots, a.mask, entry)
    return 0


cdef int clone_state(Automaton* a, int state, int length) noexcept nogil:
    cdef int clone = add_state(a, length, 0, a.end[state]), e
    if clone < 0:
        return -1
    a.link[clone] = a.link[state]
    e = a.first_edge[state]
    while e >= 0:
        if add_edge(a, clone, a.edge[e].token, a.edge[e].target) < 0:
            return -1
        e = a.edge[e].next
    return clone


cdef int append(Automaton* a, int token) noexcept nogil:
    """One step of the online construction; -1 when memory is short."""
    cdef int new = add_state(a, a.length[a.last] + 1, 1, <int>a.tokens)
    cdef int p = a.last, e = -1, q, clone
    if new < 0:
        return -1
    while p >= 0:
        e = find_edge(a, p, token)
        if e >= 0:
            break
        if add_edge(a, p, token, new) < 0:
            return -1
        p = a.link[p]
    a.link[new] = 0
    if p >= 0:
        q = a.edge[e].target
        a.link[new] = q
        if a.length[p] + 1 != a.length[q]:
            clone = clone_state(a, q, a.length[p] + 1)
            if clone < 0:
                return -1
            while p >= 0:
                e = find_edge(a, p, token)
                if e < 0 or a.edge[e].target != q:
                    break
                a.edge[e].target = clone
                p = a.link[p]
            a.link[q] = clone
            a.link[new] = clone
    a.last = new
    a.tokens += 1
    return 0


# Finalize.

cdef int propagate(Automaton* a) noexcept nogil:
    """Sums occurrences and takes the latest end along suffix links, longest states first."""
    cdef int longest = 0, s, i
    cdef int* start
    cdef int* order
    for s in range(a.states):
        longest = max(longest, a.length[s])
    start = <int*>calloc(longest + 2, sizeof(int))
    order = <int*>malloc(a.states * sizeof(int))
    if start == NULL or order == NULL:
        free(start)
        free(order)
        return -1
    for s in range(a.states):
        start[a.length[s] + 1] += 1
    for i in range(longest + 1):
        start[i + 1] += start[i]
    for s in range(a.states):
        order[start[a.length[s]]] = s
        start[a.length[s]] += 1
    for i in range(a.states - 1, 0, -1):
        s = order[i]
        a.occurrences[a.link[s]] += a.occurrences[s]
        a.end[a.link[s]] = max(a.end[a.link[s]], a.end[s])
    free(start)
    free(order)
    return 0


cdef int compare_ranked(const void* left, const void* right) noexcept nogil:
    cdef unsigned long long x = (<Ranked*>left).key, y = (<Ranked*>right).key
    return (x > y) - (x < y)


cdef unsigned long long rank_key(int value, int token) noexcept nogil:
    """Ascending keys are value descending, then token ascending; separators come last."""
    if token == SEPARATOR:
        return 0xFFFFFFFFFFFFFFFFULL
    return (<unsigned long long>(0x7FFFFFFF - value) << 32) | <unsigned int>token


cdef void sort_state(Automaton* a, int state, Ranked* ranked) noexcept nogil:
    cdef int begin = a.offset[state], degree = a.offset[state + 1] - begin, i, e, target
    e = a.first_edge[state]
    for i in range(degree):
        # 2**31 added: the separator sorts first
        ranked[i].key = <unsigned int>a.edge[e].token ^ 0x80000000U
        ranked[i].edge = e
        e = a.edge[e].next
    if degree > 1:
        qsort(ranked, degree, sizeof(Ranked), compare_ranked)
    a.children[state] = degree
    for i in range(degree):
        a.token[begin + i] = a.edge[ranked[i].edge].token
        target = a.edge[ranked[i].edge].target
        a.target[begin + i] = target
        if a.token[begin + i] == SEPARATOR:
            a.children[state] -= 1
        ranked[i].edge = begin + i
        ranked[i].key = rank_key(a.end[target], a.token[begin + i])
    if degree > 1:
        qsort(ranked, degree, sizeof(Ranked), compare_ranked)
    for i in range(degree):
        e = ranked[i].edge
        a.by_recency[begin + i] = e
        ranked[i].key = rank_key(a.occurrences[a.target[e]], a.token[e])
    if degree > 1:
        qsort(ranked, degree, sizeof(Ranked), compare_ranked)
    for i in range(degree):
        a.by_freq[begin + i] = ranked[i].edge


cdef int sort_children(Automaton* a) noexcept nogil:
    """Packs the edges state by state and sorts them by token, recency and frequency."""
    cdef int s, e, widest = 1
    cdef Ranked* ranked
    a.offset = <int*>calloc(a.states + 1, sizeof(int))
    a.children = <int*>malloc(a.states * sizeof(int))
    a.token = <int*>malloc(max(1, a.edges) * sizeof(int))
    a.target = <int*>malloc(max(1, a.edges) * sizeof(int))
    a.by_recency = <int*>malloc(max(1, a.edges) * sizeof(int))
    a.by_freq = <int*>malloc(max(1, a.edges) * sizeof(int))
    if (
        a.offset == NULL or a.children == NULL or a.token == NULL or a.target == NULL
        or a.by_recency == NULL or a.by_freq == NULL
    ):
        return -1
    for e in range(a.edges):
        a.offset[a.edge[e].state + 1] += 1
    for s in range(a.states):
        widest = max(widest, a.offset[s + 1])
        a.offset[s + 1] += a.offset[s]
    ranked = <Ranked*>malloc(widest * sizeof(Ranked))
    if ranked == NULL:
        return -1
    for s in range(a.states):
        sort_state(a, s, ranked)
    free(ranked)
    return 0


cdef void free_building(Automaton* a) noexcept nogil:
    free(a.end)
    free(a.first_edge)
    free(a.edge)
    free(a.slots)
    a.end = NULL
    a.first_edge = NULL
    a.edge = NULL
    a.slots = NULL


cdef void free_sorted(Automaton* a) noexcept nogil:
    free(a.offset)
    free(a.children)
    free(a.token)
    free(a.target)
    free(a.by_recency)
    free(a.by_freq)
    a.offset = NULL
    a.children = NULL
    a.token = NULL
    a.target = NULL
    a.by_recency = NULL
    a.by_freq = NULL


# Matching.

cdef int step(Automaton* a, int state, int token) noexcept nogil:
    cdef int low = a.offset[state], high = a.offset[state + 1], middle
    while low < high:
        middle = (low + high) // 2
        if a.token[middle] < token:
            low = middle + 1
        else:
            high = middle
    if low < a.offset[state + 1] and a.token[low] == token:
        return a.target[low]
    return -1


cdef int top_children(
    void* source, int state, int k, int match_type, Child* out, double* total
) noexcept nogil:
    """`TopChildren` of a finalized automaton."""
    cdef Automaton* a = <Automaton*>source
    cdef int* ranks = a.by_freq if match_type == PROB else a.by_recency
    cdef int found = min(k, a.children[state]), i, e
    total[0] = a.occurrences[state]
    for i in range(found):
        e = ranks[a.offset[state] + i]
        out[i].node = a.target[e]
        out[i].token = a.token[e]
        out[i].freq = a.occurrences[a.target[e]]
    return found


@final
cdef class SuffixAutomaton:
    def __cinit__(self):
        memset(&self.automaton, 0, sizeof(Automaton))
        if resize_table(&self.automaton, 64) < 0 or add_state(&self.automaton, 0, 0, -1) < 0:
            raise MemoryError("no memory for a suffix automaton")

    def __dealloc__(self):
        free(self.automaton.length)
        free(self.automaton.link)
        free(self.automaton.occurrences)
        free_building(&self.automaton)
        free_sorted(&self.automaton)
        tree_free(&self.tree)

    cdef int require_open(self) except -1:
        if self.automaton.finalized:
            raise ValueError("the automaton is finalized: build a new one to add text")
        return 0

    cdef int require_memory(self, int status) except -1:
        if status < 0:
            # A half-appended token must not be built upon.
            self.automaton.finalized = True
            raise MemoryError(f"no memory for a corpus of {self.automaton.tokens} tokens")
        return 0

    def extend(self, const int[::1] tokens not None):
        cdef Py_ssize_t i
        cdef int status = 0
        self.require_open()
        if self.automaton.tokens + tokens.shape[0] > MAX_TOKENS:
            raise ValueError(f"tokens: a corpus holds at most {MAX_TOKENS} tokens")
        for i in range(tokens.shape[0]):
            if tokens[i] < 0:
                raise ValueError(f"tokens[{i}] is {tokens[i]}: token ids are not negative")
        with nogil:
            for i in range(tokens.shape[0]):
                status = append(&self.automaton, tokens[i])
                if status < 0:
                    break
        self.require_memory(status)

    def separator(self):
        self.require_open()
        if self.automaton.tokens >= MAX_TOKENS:
            raise ValueError(f"tokens: a corpus holds at most {MAX_TOKENS} tokens")
        self.require_memory(append(&self.automaton, SEPARATOR))

    def finalize(self):
        cdef int status
        self.require_open()
        with nogil:
            status = propagate(&self.automaton)
            if status == 0:
                status = sort_children(&self.automaton)
            if status == 0:
                free_building(&self.automaton)
        # Set even on failure: half-propagated counts must not be extended.
        self.automaton.finalized = True
        if status < 0:
            free_sorted(&self.automaton)
            raise MemoryError(f"no memory to sort a corpus of {self.automaton.tokens} tokens")

    cdef int propose_row(
        self, const int* context, int length, int cap, int match_type, int max_depth,
        int min_breadth, int max_breadth,
    ) noexcept nogil:
        cdef Automaton* a = &self.automaton
        cdef int state = 0, matched = 0, target, i, match_len = 0
        for i in range(length):
            target = step(a, state, context[i])
            while target < 0 and state > 0:
                state = a.link[state]
                matched = a.length[state]
                target = step(a, state, context[i])
            if target >= 0:
                state = target
                matched += 1
        tree_reset(&self.tree, cap)
        while state > 0 and matched > 0:
            if a.children[state]:
                if match_len == 0:
                    match_len = matched
                if self.tree.count >= cap:
                    break
                if match_type == PROB:
                    tree_grow_prob(&self.tree, a, top_children, state, max_breadth)
                else:
                    tree_grow_bfs(
                        &self.tree, a, top_children, state, matched, max_depth, min_breadth,
                        max_breadth,
                    )
            state = a.link[state]
            matched = a.length[state]
        return match_len

    def propose(
        self, const int[:, ::1] contexts not None, const int[::1] lengths not None,
        const int[::1] caps not None, int match_type, int min_breadth, int max_breadth,
        int[::1] counts_out not None, int[:, ::1] tokens_out not None,
        int[:, ::1] parents_out not None, int[::1] match_len_out not None,
        float[:, ::1] weights_out not None,
    ):
        cdef Py_ssize_t rows = contexts.shape[0], r
        cdef int max_depth = <int>contexts.shape[1], columns = <int>tokens_out.shape[1]
        check_shape("lengths", lengths.shape[0], 1, rows, 1)
        check_proposal(
            match_type, min_breadth, max_breadth, rows, caps, counts_out, tokens_out, parents_out,
            match_len_out, weights_out,
        )
        if not self.automaton.finalized or self.automaton.by_freq == NULL:
            raise ValueError("the automaton is not finalized: call finalize() before propose()")
        for r in range(rows):
            if not 0 <= lengths[r] <= max_depth:
                raise ValueError(f"lengths[{r}] is {lengths[r]}: contexts has {max_depth} columns")
        if tree_reserve(&self.tree, columns, max_breadth) < 0:
            raise MemoryError("no memory for the draft tree")
        with nogil:
            for r in range(rows):
                counts_out[r] = 0
                match_len_out[r] = 0
                if caps[r] > 0 and columns > 0 and max_depth > 0:
                    match_len_out[r] = self.propose_row(
                        &contexts[r, 0], lengths[r], min(caps[r], columns), match_type,
                        max_depth, min_breadth, max_breadth,
                    )
                    counts_out[r] = self.tree.count
                    tree_write(
                        &self.tree, columns, &tokens_out[r, 0], &parents_out[r, 0],
                        &weights_out[r, 0],
                    )

    @property
    def states(self):
        return self.automaton.states

    @property
    def tokens(self):
        return self.automaton.tokens

    @property
    def finalized(self):
        return self.automaton.finalized

    @property
    def memory_bytes(self):
        cdef Automaton* a = &self.automaton
        cdef size_t bytes = a.state_room * 3 * sizeof(int)
        if a.finalized:
            bytes += a.states * 2 * sizeof(int)
            return bytes + <size_t>a.edges * 4 * sizeof(int)
        bytes += a.state_room * 2 * sizeof(int) + a.edge_room * sizeof(Edge)
        return bytes + (<size_t>a.mask + 1) * sizeof(EdgeSlot)
