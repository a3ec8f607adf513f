# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What a draft node's acceptance depends on, and the per-slot trees it is estimated for."""

cdef enum:
    MATCHES = 8         # buckets of the context a node was proposed from
    SHARES = 4          # buckets of a node's frequency share among its siblings
    RANKS = 3           # first, second and later siblings
    CELLS = 192         # MATCHES * SHARES * RANKS * 2 (first level, deeper levels)
    MAX_WIDTH = 64      # nodes of a tree
    BUCKETS = 512       # of the survival, for the counting sort


cdef struct Cell:       # acceptance given that the parent was accepted
    double hits
    double tries


cdef struct SlotState:
    int count           # nodes of the latest tree, -1 = none since the request came
    bint fresh          # the tree continues the committed text: it can be bound and learned from
    double hits         # decayed levels of this request where the tree held the true token ...
    double expected     # ... and how many the cells had promised


cdef struct Item:
    int node            # slot * width + node
    int row             # -1 once its row is full


cdef class LengthPolicy:
    cdef int slots
    cdef int width
    cdef Cell[CELLS] cells
    cdef SlotState* states
    cdef int* tokens        # [slots, width], and so on
    cdef int* parents
    cdef int* cell_of
    cdef float* survival    # probability that the node is accepted
    cdef Item* order        # [slots * width] items of one select by survival
    cdef Item* unsorted
    cdef int* kept          # [slots] by row: nodes that the latest select kept
    cdef char* keep         # [slots, width]
    cdef double estimate(self, int cell) noexcept nogil
    cdef void predict(
        self, int slot, const int* tokens, const int* parents, const float* weights, int match_len
    ) noexcept nogil
    cdef void learn_row(self, int slot, const int* run, int length) noexcept nogil
    cdef int gather(self, const int[::1] slots, const int[::1] caps, bint fresh_only) noexcept nogil
