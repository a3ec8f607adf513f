# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Row by row index work of drafting on a CPU; see draft_rows_cpu.pyi."""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy

cdef enum:
    LAST_CHUNK = 1
    VERIFY = 2


cdef int check(bint right, str what) except -1:
    if not right:
        raise ValueError(what)
    return 0


cdef int check_slots(const int32_t[::1] slots, int64_t count) except -1:
    cdef int64_t row
    for row in range(slots.shape[0]):
        if not 0 <= slots[row] < count:
            raise ValueError(f"slots: {slots[row]} is not one of {count}")
    return 0


cdef int check_offsets(const int32_t[::1] cu_q, int64_t rows, int64_t total) except -1:
    cdef int64_t row
    check(cu_q.shape[0] > rows and cu_q[0] >= 0, "cu_q: too short")
    for row in range(rows):
        check(cu_q[row] <= cu_q[row + 1], "cu_q: must ascend")
    check(cu_q[rows] <= total, "cu_q: runs beyond the tokens")
    return 0


cpdef void extend_inputs(
    const int32_t[::1] slots, const uint8_t[::1] kinds, const int32_t[::1] starts,
    const int32_t[::1] cu_q, const int32_t[::1] accept_lens, const int32_t[:, :] tokens,
    const int32_t[:, :] path, const int64_t[::1] input_ids, const int32_t[:, :] prompts,
    int64_t[::1] next_ids, int64_t[::1] sources, int64_t[::1] positions, int64_t[::1] select,
) except *:
    """As kernels.draft_extend.extend_inputs, for rows without padding."""
    cdef int64_t rows = slots.shape[0], total = input_ids.shape[0], row, i, begin, end, count, most
    check(kinds.shape[0] == rows and starts.shape[0] == rows and accept_lens.shape[0] >= rows
          and tokens.shape[0] >= rows and path.shape[0] >= rows and select.shape[0] >= rows,
          "slots, kinds, starts, accept_lens, tokens, path, select: do not agree on the rows")
    check(next_ids.shape[0] >= total and sources.shape[0] >= total
          and positions.shape[0] >= total,
          "next_ids, sources, positions: shorter than input_ids")
    check_offsets(cu_q, rows, total)
    if prompts is not None:
        check_slots(slots, prompts.shape[0])
    for i in range(total):
        sources[i] = i
        next_ids[i] = input_ids[i + 1] if i + 1 < total else 0
    for i in range(cu_q[rows], total):
        positions[i] = next_ids[i] = 0
    most = min(tokens.shape[1], path.shape[1])
    for row in range(rows):
        begin, end, count = cu_q[row], cu_q[row + 1], accept_lens[row]
        for i in range(begin, end):
            positions[i] = starts[row] + i - begin
        if kinds[row] == VERIFY:
            check(0 <= count <= min(most, end - begin), "accept_lens: beyond the row")
            for i in range(count):
                next_ids[begin + i] = tokens[row, i]
                sources[begin + i] = begin + path[row, i]
            select[row] = max(0, begin + min(max(count, 1), end - begin) - 1)
            if end - begin > count:
                next_ids[end - 1] = 0
            continue
        select[row] = max(0, end - 1)
        if begin == end:
            continue
        if kinds[row] == LAST_CHUNK:
            next_ids[end - 1] = tokens[row, 0] if count > 0 and most else 0
        elif prompts is None:
            next_ids[end - 1] = 0
        else:
            i = min(starts[row] + end - begin, prompts.shape[1] - 1)
            next_ids[end - 1] = prompts[slots[row], i]


cpdef int64_t drop_junk(
    const uint8_t[::1] kinds, const int32_t[::1] accept_lens, const int32_t[::1] cu_q,
    int64_t[::1] next_ids, int64_t[::1] sources, int64_t[::1] positions, int64_t[::1] kv_slots,
    int32_t[::1] kv_lens, int32_t[::1] begins, int64_t[::1] select,
) except -1:
    """Keep what was accepted of every row; see draft_rows_cpu.pyi."""
    cdef int64_t rows = kinds.shape[0], row, i, kept, length, out = 0
    check(accept_lens.shape[0] >= rows and kv_lens.shape[0] >= rows
          and begins.shape[0] > rows and select.shape[0] >= rows,
          "kinds, accept_lens, kv_lens, begins, select: do not agree on the rows")
    check_offsets(cu_q, rows, min(min(next_ids.shape[0], sources.shape[0]),
                                  min(positions.shape[0], kv_slots.shape[0])))
    begins[0] = 0
    for row in range(rows):
        length = cu_q[row + 1] - cu_q[row]
        kept = min(length, max(accept_lens[row], 1)) if kinds[row] == VERIFY else length
        for i in range(cu_q[row], cu_q[row] + kept):
            next_ids[out], sources[out] = next_ids[i], sources[i]
            positions[out], kv_slots[out] = positions[i], kv_slots[i]
            out += 1
        kv_lens[row] -= <int32_t>(length - kept)
        begins[row + 1] = <int32_t>out
        select[row] = max(0, out - 1)
    return out


cpdef void write_chains(
    const int64_t[:, ::1] drafts, const int32_t[::1] cu_q, const int32_t[::1] caps,
    int32_t[::1] tokens, int32_t[::1] parents, int32_t[::1] proposed, int32_t[::1] depths,
) except *:
    """As kernels.draft_nodes.write_chains."""
    cdef int64_t rows = caps.shape[0], row, i, first, count
    check(drafts.shape[1] >= rows and proposed.shape[0] >= rows and depths.shape[0] >= rows,
          "drafts, proposed, depths: do not agree on the rows")
    check_offsets(cu_q, rows, min(tokens.shape[0], parents.shape[0]))
    for row in range(rows):
        first, count = cu_q[row] + 1, min(<int64_t>caps[row], drafts.shape[0])
        check(caps[row] <= 0 or first + caps[row] <= cu_q[row + 1], "caps: beyond the row")
        for i in range(max(0, <int64_t>caps[row])):
            tokens[first + i] = <int32_t>drafts[i, row] if i < count else 0
            parents[first + i] = <int32_t>i if i < count else -1
        proposed[row] = depths[row] = <int32_t>count


def ask(
    const int32_t[::1] slots, const uint8_t[::1] kinds, const int32_t[::1] q_caps,
    int32_t[::1] asked, int32_t[::1] caps, int32_t[::1] cu_q,
):
    """Lay out the rows that may have drafts; see draft_rows_cpu.pyi."""
    cdef int64_t row, rows = slots.shape[0], count = 0
    check(kinds.shape[0] == rows and q_caps.shape[0] == rows and asked.shape[0] >= rows
          and caps.shape[0] >= rows and cu_q.shape[0] > rows,
          "slots, kinds, q_caps, asked, caps, cu_q: do not agree on the rows")
    cu_q[0] = 0
    for row in range(rows):
        if kinds[row] == VERIFY and q_caps[row] > 1:
            asked[count], caps[count] = slots[row], q_caps[row] - 1
            cu_q[count + 1] = cu_q[count] + q_caps[row]
            count += 1
    return count


def give(
    const uint8_t[::1] kinds, const int32_t[::1] q_caps, const int32_t[::1] cu_q,
    const int32_t[::1] proposed, int32_t[::1] tokens, int32_t[::1] parents, int32_t[::1] counts,
):
    """Count what every row has, and close the gaps; see draft_rows_cpu.pyi."""
    cdef int64_t row, rows = kinds.shape[0], i, first, of = 0, kept = 0
    check(q_caps.shape[0] == rows and counts.shape[0] >= rows, "q_caps, counts: too short")
    check_offsets(cu_q, cu_q.shape[0] - 1, min(tokens.shape[0], parents.shape[0]))
    for row in range(rows):
        counts[row] = 0
        if kinds[row] != VERIFY or q_caps[row] <= 1:
            continue
        check(of < min(cu_q.shape[0] - 1, proposed.shape[0]), "cu_q, proposed: too short")
        first = cu_q[of] + 1
        check(0 <= proposed[of] <= cu_q[of + 1] - first, "proposed: beyond the row")
        counts[row] = proposed[of]
        for i in range(first, first + proposed[of]):
            tokens[kept], parents[kept] = tokens[i], parents[i]
            kept += 1
        of += 1
    return kept


def spread(const int32_t[::1] lens, const int32_t[::1] values, int32_t[:, ::1] grid):
    """Write runs of ``lens`` values as rows, -1 behind them; see draft_rows_cpu.pyi."""
    cdef int64_t row, i, used = 0
    check(grid.shape[0] == lens.shape[0], "grid: not of the rows")
    for row in range(lens.shape[0]):
        check(0 <= lens[row] <= min(grid.shape[1], values.shape[0] - used), "lens: too long")
        for i in range(grid.shape[1]):
            grid[row, i] = values[used + i] if i < lens[row] else -1
        used += lens[row]


def take_rows(const int32_t[::1] slots, const uint8_t[:, ::1] state, uint8_t[:, ::1] out):
    """out[r] = state[slots[r]], rows of bytes."""
    cdef int64_t row
    check(out.shape[0] == slots.shape[0] and out.shape[1] == state.shape[1],
          "out: not of the shape of the rows taken")
    check_slots(slots, state.shape[0])
    for row in range(slots.shape[0]):
        memcpy(&out[row, 0], &state[slots[row], 0], state.shape[1])


def keep_rows(const int32_t[::1] slots, const int64_t[::1] select, const uint8_t[:, ::1] rows,
              uint8_t[:, ::1] state):
    """state[slots[r]] = rows[select[r]], rows of bytes; ``select`` None is r itself."""
    cdef int64_t row, source
    check(rows.shape[1] == state.shape[1], "state: not as wide as the rows")
    check_slots(slots, state.shape[0])
    check(select is None or select.shape[0] == slots.shape[0], "select: not of the rows")
    for row in range(slots.shape[0]):
        source = row if select is None else select[row]
        check(0 <= source < rows.shape[0], "select: beyond the rows")
        memcpy(&state[slots[row], 0], &rows[source, 0], state.shape[1])
