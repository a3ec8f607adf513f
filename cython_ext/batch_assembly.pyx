# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""The rows of a step as the flat ragged arrays that the model consumes, and KV compaction.

A row's query tokens get consecutive *sequence indices* start, start + 1, ... whatever tree they
form; `position` (rotary) follows the depth in the tree instead. For a chain both are equal.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

cdef enum:
    MAX_TREE = 64


cdef bint fail(
    Report *report, Fault fault, Py_ssize_t row, int64_t item, int64_t value
) noexcept nogil:
    report.fault = fault
    report.row = row
    report.item = item
    report.value = value
    return False


cdef bint row_fits(
    Report *report, Py_ssize_t row, const int32_t[:, ::1] page_table, int64_t page_size,
    int32_t slot, int64_t start, int64_t length,
) noexcept nogil:
    if slot < 0 or slot >= page_table.shape[0]:
        return fail(report, Fault.SLOT, row, page_table.shape[0], slot)
    if length < 0:
        return fail(report, Fault.NEGATIVE_LENGTH, row, 0, length)
    if start < 0:
        return fail(report, Fault.NEGATIVE_START, row, 0, start)
    if start + length > page_table.shape[1] * page_size:
        return fail(
            report, Fault.TABLE_WIDTH, row, page_table.shape[1] * page_size, start + length
        )
    return True


cdef bint place_row(
    Report *report, Py_ssize_t row, const int32_t *pages, int64_t page_size, int64_t start,
    int64_t length, int64_t *positions, int64_t *kv_slots, int32_t *row_of_token, uint64_t *bits,
) noexcept nogil:
    """Fill one row as a chain."""
    cdef int64_t i
    cdef uint64_t seen = 0
    for i in range(length):
        kv_slots[i] = kv_slot_of(pages, start + i, page_size)
        if kv_slots[i] < 0:
            return fail(report, Fault.NO_PAGE, row, i, start + i)
        if i < MAX_TREE:
            seen |= <uint64_t>1 << i
        bits[i] = seen
        positions[i] = start + i
        row_of_token[i] = <int32_t>row
    return True


cdef bint shape_tree(
    Report *report, Py_ssize_t row, const int32_t *parents, int64_t start, int64_t length,
    int64_t *positions, uint64_t *bits, uint8_t *is_tree,
) noexcept nogil:
    """Turn a row that was filled as a chain into the tree that its parents describe."""
    cdef int64_t i, first_branch = length
    for i in range(length):
        if parents[i] >= i or parents[i] < (0 if i > 0 else -1):
            return fail(report, Fault.PARENT, row, i, parents[i])
        if parents[i] != i - 1 and first_branch == length:
            first_branch = i
    if first_branch == length:
        return True
    if length > MAX_TREE:
        return fail(report, Fault.WIDE_TREE, row, first_branch, length)
    is_tree[0] = 1
    for i in range(first_branch, length):
        positions[i] = positions[parents[i]] + 1
        bits[i] = bits[parents[i]] | <uint64_t>1 << i
    return True


cdef int need(str name, Py_ssize_t length, Py_ssize_t needed, bint exact) except -1:
    if length < needed or (exact and length != needed):
        raise ValueError(
            f"{name} has {length} elements but {'' if exact else 'at least '}{needed} are needed"
        )
    return 0


cdef int explain(Report *report) except -1:
    """Raise the ValueError that a report stands for."""
    cdef str row = f"row {report.row}"
    if report.fault == Fault.SLOT:
        raise ValueError(f"{row}: slot {report.value} is outside 0..{report.item - 1}")
    if report.fault == Fault.NEGATIVE_LENGTH:
        raise ValueError(f"{row}: q_lens is {report.value}, a length cannot be negative")
    if report.fault == Fault.NEGATIVE_START:
        raise ValueError(f"{row}: starts is {report.value}, a start cannot be negative")
    if report.fault == Fault.TABLE_WIDTH:
        raise ValueError(
            f"{row}: needs room for {report.value} tokens but a row of page_table holds "
            f"{report.item}; cap the row's length"
        )
    if report.fault == Fault.NO_PAGE:
        raise ValueError(
            f"{row}: page_table has no page for sequence index {report.value}; "
            "allocate pages before the step"
        )
    if report.fault == Fault.PARENT:
        raise ValueError(
            f"{row}: token {report.item} has parent {report.value}; a parent must precede its "
            "child, and only a row's first token has parent -1"
        )
    if report.fault == Fault.WIDE_TREE:
        raise ValueError(
            f"{row}: a tree of {report.value} tokens (it branches at token {report.item}), at most "
            f"{<int>MAX_TREE} are possible; longer rows must be chains"
        )
    if report.fault == Fault.CU_ORDER:
        raise ValueError(
            f"{row}: accept_cu goes to {report.value}, it must not decrease nor pass accept_idx"
        )
    if report.fault == Fault.FIRST_ACCEPT:
        raise ValueError(f"{row}: the first accepted index is {report.value}, it must be 0")
    raise ValueError(
        f"{row}: accept_idx[{report.item}] is {report.value}; the indices of a row must increase"
    )


cdef bint fill(
    Report *report, const int32_t[::1] slots, const int32_t[::1] q_lens,
    const int32_t[::1] starts, const int32_t *parents, const int32_t[:, ::1] page_table,
    int64_t page_size, int64_t[::1] positions, int64_t[::1] kv_slots, int32_t[::1] row_of_token,
    int32_t[::1] cu_q, int32_t[::1] kv_lens, uint64_t[::1] tree_bits, uint8_t[::1] is_tree,
) noexcept nogil:
    cdef Py_ssize_t row
    cdef int64_t base = 0, start, length
    cu_q[0] = 0
    for row in range(slots.shape[0]):
        start = starts[row]
        length = q_lens[row]
        is_tree[row] = 0
        if length > 0:
            if not place_row(
                report, row, &page_table[slots[row], 0], page_size, start, length,
                &positions[base], &kv_slots[base], &row_of_token[base], &tree_bits[base],
            ):
                return False
            if parents is not NULL and not shape_tree(
                report, row, parents + base, start, length, &positions[base], &tree_bits[base],
                &is_tree[row],
            ):
                return False
        base += length
        cu_q[row + 1] = <int32_t>base
        kv_lens[row] = <int32_t>(start + length)
    return True


def assemble(
    const int32_t[::1] slots not None,
    const int32_t[::1] q_lens not None,
    const int32_t[::1] starts not None,
    const int32_t[::1] parents,
    const int32_t[:, ::1] page_table not None,
    int page_size,
    int64_t[::1] positions_out not None,
    int64_t[::1] kv_slots_out not None,
    int32_t[::1] row_of_token_out not None,
    int32_t[::1] cu_q_out not None,
    int32_t[::1] kv_lens_out not None,
    uint64_t[::1] tree_bits_out not None,
    uint8_t[::1] is_tree_out not None,
):
    """Flatten R rows into T query tokens and return T.

    In: slots, q_lens, starts int32 [R]; parents int32 [T] (index within the row, -1 for a row's
    first token) or None when every row is a chain; page_table int32 [S, P], 0 = no page. starts[r]
    tokens of row r have their KV in place. Rows of length 0 are allowed (padding).

    Out, each at least this long: positions_out int64 [T] = start + depth in the tree; kv_slots_out
    int64 [T], token i of a row is written at sequence index start + i; row_of_token_out int32 [T];
    cu_q_out int32 [R + 1] offsets of the rows; kv_lens_out int32 [R] = start + q_len;
    tree_bits_out uint64 [T], bit j set iff the token may attend to token j < 64 of its own row
    (itself and its ancestors; in a chain all before it); is_tree_out uint8 [R], 0 for chains.

    Raises ValueError naming the row or the array: sizes that do not fit, a slot or sequence index
    outside page_table, no page for a written index, a parent that does not precede its child, a
    tree of more than 64 tokens. The outputs are undefined after an error.
    """
    cdef Py_ssize_t row, rows = slots.shape[0]
    cdef int64_t total = 0
    cdef Report report
    cdef const int32_t *parents_ptr = NULL
    cdef bint ok = True
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}, it must be at least 1")
    need("q_lens", q_lens.shape[0], rows, True)
    need("starts", starts.shape[0], rows, True)
    need("cu_q_out", cu_q_out.shape[0], rows + 1, False)
    need("kv_lens_out", kv_lens_out.shape[0], rows, False)
    need("is_tree_out", is_tree_out.shape[0], rows, False)
    for row in range(rows):
        ok = row_fits(
            &report, row, page_table, page_size, slots[row], starts[row], q_lens[row]
        )
        if not ok:
            break
        total += q_lens[row]
    if not ok:
        explain(&report)
    need("positions_out", positions_out.shape[0], total, False)
    need("kv_slots_out", kv_slots_out.shape[0], total, False)
    need("row_of_token_out", row_of_token_out.shape[0], total, False)
    need("tree_bits_out", tree_bits_out.shape[0], total, False)
    if parents is not None:
        need("parents", parents.shape[0], total, True)
        if total > 0:
            parents_ptr = &parents[0]
    ok = fill(
        &report, slots, q_lens, starts, parents_ptr, page_table, page_size, positions_out,
        kv_slots_out, row_of_token_out, cu_q_out, kv_lens_out, tree_bits_out, is_tree_out,
    )
    if not ok:
        explain(&report)
    return total


cdef Py_ssize_t compact(
    Report *report, const int32_t[::1] slots, const int32_t[::1] starts,
    const int32_t[:, ::1] page_table, int64_t page_size, const int32_t[::1] accept_cu,
    const int32_t[::1] accept_idx, int64_t[::1] src, int64_t[::1] dst,
) noexcept nogil:
    cdef Py_ssize_t row, j, begin, end, moves = 0
    cdef int64_t start, node, from_slot, to_slot
    cdef const int32_t *pages
    for row in range(slots.shape[0]):
        begin, end = accept_cu[row], accept_cu[row + 1]
        if end < begin or end > accept_idx.shape[0]:
            fail(report, Fault.CU_ORDER, row, 0, end)
            return -1
        if begin == end:
            continue
        if accept_idx[begin] != 0:
            fail(report, Fault.FIRST_ACCEPT, row, begin, accept_idx[begin])
            return -1
        for j in range(begin + 1, end):
            if accept_idx[j] <= accept_idx[j - 1]:
                fail(report, Fault.ACCEPT_ORDER, row, j, accept_idx[j])
                return -1
        start = starts[row]
        if not row_fits(
            report, row, page_table, page_size, slots[row], start,
            <int64_t>accept_idx[end - 1] + 1,
        ):
            return -1
        pages = &page_table[slots[row], 0]
        for j in range(end - begin):
            node = accept_idx[begin + j]
            if node == j:
                continue
            from_slot = kv_slot_of(pages, start + node, page_size)
            to_slot = kv_slot_of(pages, start + j, page_size)
            if from_slot < 0 or to_slot < 0:
                fail(report, Fault.NO_PAGE, row, node, start + (node if from_slot < 0 else j))
                return -1
            src[moves] = from_slot
            dst[moves] = to_slot
            moves += 1
    return moves


def compact_accepted(
    const int32_t[::1] slots not None,
    const int32_t[::1] starts not None,
    const int32_t[:, ::1] page_table not None,
    int page_size,
    const int32_t[::1] accept_cu not None,
    const int32_t[::1] accept_idx not None,
    int64_t[::1] src_out not None,
    int64_t[::1] dst_out not None,
):
    """Write the KV moves that put each row's accepted nodes side by side; return their number.

    In: slots, starts int32 [R], page_table int32 [S, P] as in `assemble`; accept_cu int32 [R + 1]
    offsets into accept_idx int32 [A], the accepted nodes' indices within their row: the first is
    0 and they increase. The j-th accepted node of a row moves to sequence index start + j.

    Out, each at least A long: src_out, dst_out int64, KV slots; nodes already in place are left
    out. A node never moves up and never over a later source, so the moves may be applied in order.

    Raises ValueError naming the row or the array. The outputs are undefined after an error.
    """
    cdef Py_ssize_t moves, rows = slots.shape[0]
    cdef Report report
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}, it must be at least 1")
    need("starts", starts.shape[0], rows, True)
    need("accept_cu", accept_cu.shape[0], rows + 1, True)
    if accept_cu[0] != 0 or accept_cu[rows] != accept_idx.shape[0]:
        raise ValueError(
            f"accept_cu runs from {accept_cu[0]} to {accept_cu[rows]}, it must run from 0 to the "
            f"{accept_idx.shape[0]} elements of accept_idx"
        )
    need("src_out", src_out.shape[0], accept_idx.shape[0], False)
    need("dst_out", dst_out.shape[0], accept_idx.shape[0], False)
    moves = compact(
        &report, slots, starts, page_table, page_size, accept_cu, accept_idx, src_out, dst_out
    )
    if moves < 0:
        explain(&report)
    return moves
