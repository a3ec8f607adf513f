# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""The acceptance walk over ragged draft trees, and what it leaves behind per slot.

From the root on, a node's child is accepted iff its token equals the target's token at the node.
The target's token at the last accepted node is the bonus token. Greedy and coupled sampling
differ only in how the target's tokens were chosen.
"""

from libc.stdint cimport int32_t, int64_t


cdef Py_ssize_t walk_row(
    const int64_t *tokens, const int32_t *parents, const int64_t *targets, Py_ssize_t width,
    Py_ssize_t most, Accepted *out,
) noexcept nogil:
    """Walk one row of ``width`` nodes; the tokens of its path, 0 if one of the first ``most``
    targets was < 0. A later one ends the path."""
    cdef Py_ssize_t node = 0, child, length = 0
    while True:
        if targets[node] < 0:
            return 0 if length < most else length
        out.nodes[length] = <int32_t>node
        out.tokens[length] = <int32_t>targets[node]
        if node != length:
            out.scattered = True
        length += 1
        child = node + 1
        while child < width and (
            tokens[child] != targets[node] or (parents is not NULL and parents[child] != node)
        ):
            # In a chain only the next node is a child.
            child = width if parents is NULL else child + 1
        if child >= width:
            return length
        node = child


cdef int need(str name, Py_ssize_t length, Py_ssize_t needed) except -1:
    if length < needed:
        raise ValueError(f"{name} has {length} elements but at least {needed} are needed")
    return 0


def walk(
    const int64_t[::1] input_ids not None,
    const int32_t[::1] parents,
    const int32_t[::1] cu_q not None,
    const int32_t[::1] node_cu not None,
    const int64_t[::1] targets not None,
    int32_t[::1] accept_lens_out not None,
    int32_t[::1] accept_cu_out not None,
    int32_t[::1] accept_idx_out not None,
    int32_t[::1] emitted_out not None,
    const int32_t[::1] most=None,
    int32_t[::1] trimmed_out=None,
):
    """Accept R rows and return (tokens emitted in all, whether any accepted nodes have gaps).

    In: input_ids int64 [T], parents int32 [T] (index within the row, before the node; None when
    every row is a chain), cu_q and node_cu int32 [R + 1] offsets of the rows' tokens and nodes. A
    row's nodes are its last tokens: none, one, or (with drafts) all. targets int64 [N]: the
    target's token at each node; a negative one is unusable, and a row whose walk meets it emits
    nothing. most int32 [R], 1 or more: tokens that a row emits, None for no limit; the last of them
    is the target's, the bonus token.

    Out: accept_lens_out int32 [R]; accept_cu_out int32 [R + 1] offsets into accept_idx_out (the
    accepted nodes' indices within their row's nodes, rising) and emitted_out (tokens), each
    int32, at least N long; with ``most`` trimmed_out int32 [R], tokens of the path beyond it.

    Raises ValueError naming the array that is too short.
    """
    cdef Py_ssize_t row, rows = node_cu.shape[0] - 1, width, first, total = 0, length, limit
    cdef Accepted out
    cdef const int32_t *tree = NULL
    need("node_cu", node_cu.shape[0], 1)
    need("cu_q", cu_q.shape[0], rows + 1)
    need("input_ids", input_ids.shape[0], cu_q[rows])
    if parents is not None:
        need("parents", parents.shape[0], cu_q[rows])
    need("targets", targets.shape[0], node_cu[rows])
    need("accept_lens_out", accept_lens_out.shape[0], rows)
    need("accept_cu_out", accept_cu_out.shape[0], rows + 1)
    need("accept_idx_out", accept_idx_out.shape[0], node_cu[rows])
    need("emitted_out", emitted_out.shape[0], node_cu[rows])
    if most is not None:
        need("most", most.shape[0], rows)
        if trimmed_out is None:
            raise ValueError("most comes with trimmed_out")
        need("trimmed_out", trimmed_out.shape[0], rows)
    accept_cu_out[0] = 0
    out.scattered = False
    for row in range(rows):
        width = node_cu[row + 1] - node_cu[row]
        length = 0
        limit = width if most is None else max(1, most[row])
        if width > 0:
            first = cu_q[row + 1] - width
            if parents is not None:
                tree = &parents[first]
            out.nodes = &accept_idx_out[total]
            out.tokens = &emitted_out[total]
            length = walk_row(
                &input_ids[first], tree, &targets[node_cu[row]], width, limit, &out
            )
        if most is not None:
            trimmed_out[row] = <int32_t>max(0, length - limit)
            length = min(length, limit)
        accept_lens_out[row] = <int32_t>length
        total += length
        accept_cu_out[row + 1] = <int32_t>total
    return total, bool(out.scattered)


def advance(
    const int32_t[::1] slots not None,
    const int32_t[::1] starts not None,
    const int32_t[::1] q_lens not None,
    const int32_t[::1] node_cu not None,
    const int32_t[::1] accept_cu not None,
    const int32_t[::1] emitted not None,
    int32_t[::1] seq_lens not None,
    int32_t[::1] last_tokens not None,
    int32_t[::1] out_counts not None,
):
    """Move per-slot state [S] over what each of R rows emitted.

    seq_lens: tokens with KV in place, now the row's prefix, chunk and accepted nodes; last_tokens:
    the row's bonus token; out_counts grows by the emitted tokens. Rows that have nodes but emitted
    nothing (unusable numbers) change nothing. Raises ValueError naming an array or a slot.
    """
    cdef Py_ssize_t row, rows = slots.shape[0]
    cdef int32_t slot, width, length, states = <int32_t>seq_lens.shape[0]
    cdef int32_t bad = -1
    need("starts", starts.shape[0], rows)
    need("q_lens", q_lens.shape[0], rows)
    need("node_cu", node_cu.shape[0], rows + 1)
    need("accept_cu", accept_cu.shape[0], rows + 1)
    need("emitted", emitted.shape[0], accept_cu[rows])
    need("last_tokens", last_tokens.shape[0], states)
    need("out_counts", out_counts.shape[0], states)
    for row in range(rows):
        slot = slots[row]
        if slot < 0 or slot >= states:
            bad = <int32_t>row
            break
        width = node_cu[row + 1] - node_cu[row]
        length = accept_cu[row + 1] - accept_cu[row]
        if width > 0 and length == 0:
            continue
        seq_lens[slot] = starts[row] + q_lens[row] - width + length
        if length > 0:
            last_tokens[slot] = emitted[accept_cu[row + 1] - 1]
            out_counts[slot] += length
    if bad >= 0:
        raise ValueError(f"row {bad}: slot {slots[bad]} is outside 0..{states - 1}")
