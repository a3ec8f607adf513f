# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""A step's rows written into the one block of int32 that is copied to a device."""

from libc.stdint cimport int32_t, int64_t, uint8_t

cdef enum:
    PREFILL = 0
    VERIFY = 2


# Fields of the block in their order.
cdef enum:
    SLOTS = 0
    KINDS = 1
    STARTS = 2
    CAPS = 3
    CU_Q = 4
    NODE_CU = 5
    TOKENS = 6
    PARENTS = 7
    NODE_INDEX = 8
    UPDATE_SLOTS = 9
    UPDATE_COLUMNS = 10
    UPDATE_PAGES = 11
    ENTRY_SLOTS = 12
    ENTRY_LENS = 13
    ENTRY_OUTS = 14
    COUNTS = 15
    FIELDS = 16


def tally_rows(
    const uint8_t[::1] kinds not None,
    const int32_t[::1] q_lens not None,
    int32_t[::1] cu_q_out not None,
):
    """Write prefix sums of ``q_lens`` int32 [R] to ``cu_q_out`` int32 [R + 1].

    Returns (how many rows are verify rows, or -1 if one of them follows another row; the most
    query tokens of a row that is none, or 0). Raises ValueError for arrays that are too short.
    """
    cdef Py_ssize_t row, rows = kinds.shape[0]
    cdef int32_t total = 0, leading = 0, longest = 0
    if q_lens.shape[0] < rows or cu_q_out.shape[0] < rows + 1:
        raise ValueError(f"q_lens and cu_q_out are too short for {rows} rows")
    cu_q_out[0] = 0
    for row in range(rows):
        total += q_lens[row]
        cu_q_out[row + 1] = total
        if kinds[row] != VERIFY:
            longest = max(longest, q_lens[row])
        elif leading == row:
            leading += 1
        else:
            leading = -1
    return leading, longest


cdef inline void put(
    int32_t *out, Py_ssize_t room, const int32_t *values, Py_ssize_t count, int32_t rest
) noexcept nogil:
    """``count`` values, and ``rest`` in what is left of the field."""
    cdef Py_ssize_t i
    for i in range(count):
        out[i] = values[i]
    for i in range(count, room):
        out[i] = rest


cdef inline void put_apart(
    int32_t *out, Py_ssize_t room, const int32_t *values, Py_ssize_t count,
    Py_ssize_t leading, Py_ssize_t gap, int32_t between, int32_t rest
) noexcept nogil:
    """As ``put``, with ``gap`` times ``between`` behind the first ``leading`` values."""
    put(out, leading + gap, values, leading, between)
    put(out + leading + gap, room - leading - gap, values + leading, count - leading, rest)


cdef inline void put_wide(
    int32_t *out, Py_ssize_t room, const int64_t *values, Py_ssize_t count, int32_t rest
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        out[i] = <int32_t>values[i]
    for i in range(count, room):
        out[i] = rest


cdef int fits(str name, Py_ssize_t count, Py_ssize_t given, Py_ssize_t room) except -1:
    if count > given or count > room:
        raise ValueError(f"{name}: {count} are needed, {given} given and room for {room}")
    return 0


def fill_block(
    int32_t[::1] block not None,
    const int64_t[::1] edges not None,
    int32_t spare_slot,
    Py_ssize_t tokens,
    Py_ssize_t nodes,
    Py_ssize_t leading,
    Py_ssize_t gap,
    const int32_t[::1] slots not None,
    const uint8_t[::1] kinds not None,
    const int32_t[::1] starts not None,
    const int32_t[::1] caps,
    const int32_t[::1] cu_q not None,
    const int32_t[::1] node_cu not None,
    const int64_t[::1] ids not None,
    const int32_t[::1] parents not None,
    const int64_t[::1] node_index not None,
    const int32_t[::1] page_slots not None,
    const int32_t[::1] page_columns not None,
    const int32_t[::1] page_ids not None,
    const int32_t[:, ::1] entries,
):
    """Write R rows, ``tokens`` T, ``nodes`` N and the updates to ``block`` int32, the rest padded.

    The first ``leading`` rows stand in front, the others behind ``gap`` rows of padding.
    ``edges`` int64 [17]: where the fields begin, and the end of the last. In: slots, starts, caps
    int32 [R] (caps None: all 0), kinds uint8 [R], cu_q, node_cu int32 [R + 1]; ids int64,
    parents int32 [>= T], node_index int64 [>= N]; page_* int32 [U]; entries int32 [E, 3] (slot,
    length, outputs), None for none. Rows of padding name ``spare_slot``, are of kind PREFILL and
    have no tokens; tokens of padding are 0 without a parent, nodes of padding the last token.
    Entries of padding are empty requests in the spare slot.

    Raises ValueError for what does not fit; the block is undefined then.
    """
    cdef Py_ssize_t rows = slots.shape[0], updates = page_slots.shape[0], i
    cdef Py_ssize_t entered = 0 if entries is None else entries.shape[0]
    cdef Py_ssize_t row_room, token_room, update_room, entry_room
    cdef int32_t *out
    if edges.shape[0] != FIELDS + 1 or block.shape[0] < edges[FIELDS] or edges[0] < 0:
        raise ValueError(f"the block of {block.shape[0]} does not hold its {FIELDS} fields")
    for i in range(FIELDS):
        if edges[i + 1] < edges[i]:
            raise ValueError("edges descend")
    if edges[FIELDS] - edges[COUNTS] != 2:
        raise ValueError("the last field has two elements")
    out = &block[0]
    row_room, token_room = edges[KINDS] - edges[SLOTS], edges[PARENTS] - edges[TOKENS]
    update_room = edges[UPDATE_COLUMNS] - edges[UPDATE_SLOTS]
    entry_room = edges[ENTRY_LENS] - edges[ENTRY_SLOTS]
    for i in (KINDS, STARTS, CAPS):
        fits("row field", row_room, row_room, edges[i + 1] - edges[i])
    for i in (CU_Q, NODE_CU):
        fits("prefix sums", row_room + 1, row_room + 1, edges[i + 1] - edges[i])
    for i in (PARENTS, NODE_INDEX):
        fits("token field", token_room, token_room, edges[i + 1] - edges[i])
    for i in (UPDATE_COLUMNS, UPDATE_PAGES):
        fits("update field", update_room, update_room, edges[i + 1] - edges[i])
    for i in (ENTRY_LENS, ENTRY_OUTS):
        fits("entry field", entry_room, entry_room, edges[i + 1] - edges[i])
    if not 0 <= leading <= rows or gap < 0:
        raise ValueError(f"{leading} of {rows} rows lead, {gap} rows of padding follow")
    fits("kinds", rows, kinds.shape[0], row_room)
    fits("rows and the padding between them", rows + gap, rows + gap, row_room)
    fits("starts", rows, starts.shape[0], row_room)
    if caps is not None:
        fits("caps", rows, caps.shape[0], row_room)
    fits("cu_q", rows + 1, cu_q.shape[0], row_room + 1)
    fits("node_cu", rows + 1, node_cu.shape[0], row_room + 1)
    fits("ids", tokens, ids.shape[0], token_room)
    fits("parents", tokens, parents.shape[0], token_room)
    fits("node_index", nodes, node_index.shape[0], token_room)
    fits("page_columns", updates, page_columns.shape[0], update_room)
    fits("page_ids", updates, page_ids.shape[0], update_room)
    fits("entries", entered, entered, entry_room)
    if entered and entries.shape[1] != 3:
        raise ValueError("entries have a slot, a length and a number of outputs each")
    put_apart(
        out + edges[SLOTS], row_room, &slots[0] if rows else NULL, rows, leading, gap,
        spare_slot, spare_slot,
    )
    put_apart(
        out + edges[STARTS], row_room, &starts[0] if rows else NULL, rows, leading, gap, 0, 0
    )
    put_apart(
        out + edges[CAPS], row_room, &caps[0] if caps is not None and rows else NULL,
        rows if caps is not None else 0, leading if caps is not None else 0, gap, 0, 0,
    )
    for i in range(row_room):
        out[edges[KINDS] + i] = PREFILL
    for i in range(rows):
        out[edges[KINDS] + i + (0 if i < leading else gap)] = kinds[i]
    # A row of padding ends where the one before it does.
    put_apart(
        out + edges[CU_Q], row_room + 1, &cu_q[0], rows + 1, leading + 1, gap,
        cu_q[leading], <int32_t>tokens,
    )
    put_apart(
        out + edges[NODE_CU], row_room + 1, &node_cu[0], rows + 1, leading + 1, gap,
        node_cu[leading], <int32_t>nodes,
    )
    put_wide(out + edges[TOKENS], token_room, &ids[0] if tokens else NULL, tokens, 0)
    put(out + edges[PARENTS], token_room, &parents[0] if tokens else NULL, tokens, -1)
    put_wide(
        out + edges[NODE_INDEX], token_room, &node_index[0] if nodes else NULL, nodes,
        <int32_t>max(0, tokens - 1),
    )
    put(
        out + edges[UPDATE_SLOTS], update_room, &page_slots[0] if updates else NULL, updates,
        spare_slot,
    )
    put(out + edges[UPDATE_COLUMNS], update_room, &page_columns[0] if updates else NULL, updates, 0)
    put(out + edges[UPDATE_PAGES], update_room, &page_ids[0] if updates else NULL, updates, 0)
    for i in range(entry_room):
        out[edges[ENTRY_SLOTS] + i] = entries[i, 0] if i < entered else spare_slot
        out[edges[ENTRY_LENS] + i] = entries[i, 1] if i < entered else 0
        out[edges[ENTRY_OUTS] + i] = entries[i, 2] if i < entered else 0
    out[edges[COUNTS]] = <int32_t>updates
    out[edges[COUNTS] + 1] = <int32_t>entered
