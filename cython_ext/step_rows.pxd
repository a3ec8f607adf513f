from libc.stdint cimport int32_t, int64_t, uint8_t

cdef enum RowFault:
    NONE = 0
    SLOT = 1
    KIND = 2
    LENGTH = 3
    TOKENS = 4
    VOCABULARY = 5
    COUNT = 6
    PARENT = 7
    DRAFTS = 8

cdef struct RowReport:
    RowFault fault
    Py_ssize_t row
    int64_t value
    int64_t limit

cdef struct Taken:
    Py_ssize_t tokens
    Py_ssize_t nodes
    Py_ssize_t prompt
    Py_ssize_t drafts
    bint branches

# A plan's R rows and their drafts. Pointers of drafts are NULL where no row has any.
cdef struct PlanRows:
    Py_ssize_t rows
    const int32_t *slots
    const uint8_t *kinds
    const int32_t *q_caps
    const int32_t *starts
    const int32_t *tokens           # [num_tokens], of the chunks
    Py_ssize_t num_tokens
    const int32_t *counts           # [R], drafts that are given
    const int32_t *draft_tokens     # [num_drafts]
    const int32_t *draft_parents
    Py_ssize_t num_drafts
    const int32_t *room             # [R], drafts that the device makes instead

# By slot; NULL where the device knows them: every slot is empty then and ends in 0.
cdef struct SlotStates:
    Py_ssize_t slots
    const int32_t *lengths
    const int32_t *last

# Where rows are laid; see resolve_rows.
cdef struct LaidRows:
    int32_t *starts
    int32_t *q_lens
    int64_t *ids
    int32_t *parents
    int32_t *node_cu
    int64_t *index
    int32_t *depths

cdef bint lay_rows(
    RowReport *report, Taken *taken, const PlanRows *plan, const SlotStates *states,
    int32_t vocab, LaidRows *out,
) noexcept nogil

cdef int refuse(bint laid, RowReport *report, Taken *taken, const PlanRows *plan) except -1
