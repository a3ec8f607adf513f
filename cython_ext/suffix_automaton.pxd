# cython: language_level=3
from .draft_tree cimport DraftTree


cdef struct Edge:       # while building
    int state
    int token
    int target
    int next            # next edge of the state, -1 = none


cdef struct EdgeSlot:
    unsigned int hash
    int edge            # edge + 1, 0 = empty


cdef struct Automaton:
    int states
    int state_room
    int edges
    int edge_room
    long long tokens
    int last            # state of the whole text read so far
    bint finalized
    int* length         # [states] longest string of the state
    int* link           # [states] suffix link, -1 for the start
    int* occurrences    # [states]
    int* end            # [states] last end position, freed by finalize
    int* first_edge     # [states], freed by finalize
    Edge* edge          # [edges], freed by finalize
    EdgeSlot* slots     # [mask + 1], freed by finalize
    unsigned int mask
    # After finalize: edges of state s are [offset[s], offset[s + 1]).
    int* offset         # [states + 1]
    int* children       # [states] edges that are no separator
    int* token          # [edges] by token, ascending
    int* target         # [edges]
    int* by_recency     # [edges] positions in token / target, separators last
    int* by_freq        # [edges]


cdef class SuffixAutomaton:
    cdef Automaton automaton
    cdef DraftTree tree

    cdef int require_open(self) except -1
    cdef int require_memory(self, int status) except -1
    cdef int propose_row(self, const int* context, int length, int cap, int match_type,
                         int max_depth, int min_breadth, int max_breadth) noexcept nogil
