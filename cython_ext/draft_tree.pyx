# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Merging of the token trees that several sources propose for the same rows."""
from libc.string cimport memset


cdef int load_row(
    DraftTree* tree, int count, int* tokens, int* parents, float* weights
) noexcept nogil:
    """Adds one written row to `tree`; -1 for a parent that does not come before its child."""
    cdef int i
    for i in range(count):
        if parents[i] < 0 or parents[i] > i:
            return -1
        # order[j] is the merged index of the row's node j; -1 below a node that found no room.
        tree.order[i + 1] = -1
        if tree.order[parents[i]] >= 0:
            tree.order[i + 1] = tree_add(tree, tree.order[parents[i]], tokens[i], weights[i])
    return 0


def merge_trees(
    const int[::1] caps not None,
    int[::1] counts not None, int[:, ::1] tokens not None, int[:, ::1] parents not None,
    float[:, ::1] weights not None,
    const int[::1] other_counts not None, int[:, ::1] other_tokens not None,
    int[:, ::1] other_parents not None, float[:, ::1] other_weights not None,
):
    """Adds each row's other tree to its first one; equal paths become one node."""
    cdef Py_ssize_t rows = counts.shape[0], columns = tokens.shape[1], r
    cdef Py_ssize_t other_columns = other_tokens.shape[1]
    cdef Py_ssize_t parent_columns = other_parents.shape[1]
    cdef Py_ssize_t weight_columns = other_weights.shape[1]
    cdef DraftTree tree
    cdef int bad = -1
    check_shape("caps", caps.shape[0], 1, rows, 1)
    check_shape("tokens", tokens.shape[0], columns, rows, columns)
    check_shape("parents", parents.shape[0], parents.shape[1], rows, columns)
    check_shape("weights", weights.shape[0], weights.shape[1], rows, columns)
    check_shape("other_counts", other_counts.shape[0], 1, rows, 1)
    check_shape("other_tokens", other_tokens.shape[0], other_columns, rows, other_columns)
    check_shape("other_parents", other_parents.shape[0], parent_columns, rows, other_columns)
    check_shape("other_weights", other_weights.shape[0], weight_columns, rows, other_columns)
    for r in range(rows):
        if not 0 <= counts[r] <= columns or not 0 <= other_counts[r] <= other_columns:
            raise ValueError(f"counts: row {r} names more nodes than the arrays have columns")
    if columns == 0 or other_columns == 0:
        return
    memset(&tree, 0, sizeof(DraftTree))
    try:
        if tree_reserve(&tree, <int>max(columns, other_columns), 1) < 0:
            raise MemoryError("no memory for the merged draft tree")
        with nogil:
            for r in range(rows):
                if other_counts[r] == 0:
                    continue
                tree_reset(&tree, min(caps[r], <int>columns))
                tree.order[0] = 0
                if (
                    load_row(&tree, counts[r], &tokens[r, 0], &parents[r, 0], &weights[r, 0]) < 0
                    or load_row(
                        &tree, other_counts[r], &other_tokens[r, 0], &other_parents[r, 0],
                        &other_weights[r, 0],
                    ) < 0
                ):
                    bad = <int>r
                    break
                tree_write(
                    &tree, <int>columns, &tokens[r, 0], &parents[r, 0], &weights[r, 0]
                )
                counts[r] = tree.count
    finally:
        tree_free(&tree)
    if bad >= 0:
        raise ValueError(f"parents: row {bad} has a node before its parent")
