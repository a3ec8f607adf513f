# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Rows of a step plan resolved against per-slot state: which tokens the target model sees.

A *node* is a query token whose logits decide something: every token of a verify row, the last
token of a prompt's last chunk, none of the other chunks.

The GIL is kept here and in the step's other index work: given up for microseconds in front of a
forward pass, it comes back only when the thread that plans the next step is done.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t

cdef enum:
    PREFILL = 0
    PREFILL_LAST = 1
    VERIFY = 2
    MAX_DRAFTS = 63


cdef bint fail(
    RowReport *report, RowFault fault, Py_ssize_t row, int64_t value, int64_t limit
) noexcept nogil:
    report.fault = fault
    report.row = row
    report.value = value
    report.limit = limit
    return False


cdef bint take_chunk(
    RowReport *report, Taken *taken, Py_ssize_t row, int32_t length, const PlanRows *plan,
    int32_t vocab, int64_t *ids, int32_t *parents,
) noexcept nogil:
    cdef int32_t i, token
    if length < 1:
        return fail(report, RowFault.LENGTH, row, length, 1)
    if taken.prompt + length > plan.num_tokens:
        return fail(report, RowFault.TOKENS, row, taken.prompt + length, plan.num_tokens)
    for i in range(length):
        token = plan.tokens[taken.prompt + i]
        if token < 0 or token >= vocab:
            return fail(report, RowFault.VOCABULARY, row, token, vocab)
        ids[i] = token
        parents[i] = i - 1
    taken.prompt += length
    return True


cdef bint take_tree(
    RowReport *report, Taken *taken, Py_ssize_t row, int32_t count, const int32_t *tokens,
    const int32_t *tree, int32_t vocab, int64_t *ids, int32_t *parents, int32_t *depth,
) noexcept nogil:
    """Write a verify row's drafts after its first token; ``depth`` becomes the tree's depth."""
    cdef int32_t i, parent
    cdef int32_t levels[MAX_DRAFTS + 1]
    levels[0] = 0
    depth[0] = 0
    for i in range(1, count + 1):
        parent = tree[i - 1]
        if parent < 0 or parent >= i:
            return fail(report, RowFault.PARENT, row, i, parent)
        if tokens[i - 1] < 0 or tokens[i - 1] >= vocab:
            return fail(report, RowFault.VOCABULARY, row, tokens[i - 1], vocab)
        ids[i] = tokens[i - 1]
        parents[i] = parent
        levels[i] = levels[parent] + 1
        depth[0] = max(depth[0], levels[i])
        if parent != i - 1:
            taken.branches = True
    taken.drafts += count
    return True


cdef void leave_room(int32_t count, int64_t *ids, int32_t *parents) noexcept nogil:
    """Padding behind a verify row's first token, for drafts that the device makes."""
    cdef int32_t i
    for i in range(1, count + 1):
        ids[i] = 0
        parents[i] = -1


cdef bint lay_rows(
    RowReport *report, Taken *taken, const PlanRows *plan, const SlotStates *states,
    int32_t vocab, LaidRows *out,
) noexcept nogil:
    cdef Py_ssize_t row
    cdef int32_t length, count, room, slot, width, i
    cdef bint ok = True
    taken.tokens = taken.nodes = taken.prompt = taken.drafts = 0
    taken.branches = False
    out.node_cu[0] = 0
    for row in range(plan.rows):
        slot = plan.slots[row]
        if slot < 0 or slot >= states.slots:
            return fail(report, RowFault.SLOT, row, slot, states.slots)
        room = 0 if plan.room is NULL else plan.room[row]
        count = room if plan.counts is NULL or room else plan.counts[row]
        out.depths[row] = 0
        if plan.kinds[row] == VERIFY:
            if plan.q_caps[row] < 1:
                return fail(report, RowFault.LENGTH, row, plan.q_caps[row], 1)
            width = min(plan.q_caps[row] - 1, <int32_t>MAX_DRAFTS)
            if count < 0 or count > width:
                return fail(report, RowFault.COUNT, row, count, width)
            if not room and taken.drafts + count > plan.num_drafts:
                return fail(report, RowFault.DRAFTS, row, taken.drafts + count, plan.num_drafts)
            out.starts[row] = 0 if states.lengths is NULL else states.lengths[slot]
            out.ids[taken.tokens] = 0 if states.last is NULL else states.last[slot]
            out.parents[taken.tokens] = -1
            length = width = count + 1
            if room:
                leave_room(count, out.ids + taken.tokens, out.parents + taken.tokens)
            elif count:
                ok = take_tree(
                    report, taken, row, count, plan.draft_tokens + taken.drafts,
                    plan.draft_parents + taken.drafts, vocab, out.ids + taken.tokens,
                    out.parents + taken.tokens, out.depths + row,
                )
        elif plan.kinds[row] <= PREFILL_LAST:
            if count:
                return fail(report, RowFault.COUNT, row, count, 0)
            out.starts[row] = plan.starts[row]
            length = plan.q_caps[row]
            width = plan.kinds[row]
            ok = take_chunk(
                report, taken, row, length, plan, vocab, out.ids + taken.tokens,
                out.parents + taken.tokens,
            )
        else:
            return fail(report, RowFault.KIND, row, plan.kinds[row], VERIFY)
        if not ok:
            return False
        out.q_lens[row] = length
        taken.tokens += length
        for i in range(width):
            out.index[taken.nodes + i] = taken.tokens - width + i
        taken.nodes += width
        out.node_cu[row + 1] = <int32_t>taken.nodes
    return True


cdef int refuse(bint laid, RowReport *report, Taken *taken, const PlanRows *plan) except -1:
    """Raise ValueError for rows that could not be laid, and for what they left over."""
    if not laid:
        explain(report)
    if taken.prompt != plan.num_tokens or taken.drafts != plan.num_drafts:
        raise ValueError(
            f"the rows take {taken.prompt} prompt tokens and {taken.drafts} drafts, "
            f"{plan.num_tokens} and {plan.num_drafts} were given"
        )
    return 0


cdef int explain(RowReport *report) except -1:
    cdef str row = f"row {report.row}"
    if report.fault == RowFault.SLOT:
        raise ValueError(f"{row}: slot {report.value} is outside 0..{report.limit - 1}")
    if report.fault == RowFault.KIND:
        raise ValueError(f"{row}: kind {report.value} is not a RowKind (0..{report.limit})")
    if report.fault == RowFault.LENGTH:
        raise ValueError(f"{row}: q_caps is {report.value}, it must be at least {report.limit}")
    if report.fault == RowFault.TOKENS:
        raise ValueError(
            f"{row}: the chunks so far need {report.value} tokens, the plan has {report.limit}"
        )
    if report.fault == RowFault.VOCABULARY:
        raise ValueError(
            f"{row}: token {report.value} is outside the vocabulary of {report.limit} tokens"
        )
    if report.fault == RowFault.COUNT:
        raise ValueError(f"{row}: {report.value} drafts, between 0 and {report.limit} are allowed")
    if report.fault == RowFault.PARENT:
        raise ValueError(
            f"{row}: node {report.value} has parent {report.limit}; parents precede their children"
        )
    raise ValueError(
        f"{row}: the rows so far have {report.value} drafts, only {report.limit} were given"
    )


cdef int need(str name, Py_ssize_t length, Py_ssize_t needed) except -1:
    if length < needed:
        raise ValueError(f"{name} has {length} elements but at least {needed} are needed")
    return 0


def resolve_rows(
    const int32_t[::1] slots not None,
    const uint8_t[::1] kinds not None,
    const int32_t[::1] q_caps not None,
    const int32_t[::1] starts not None,
    const int32_t[::1] tokens not None,
    const int32_t[::1] counts,
    const int32_t[::1] draft_tokens,
    const int32_t[::1] draft_parents,
    const int32_t[::1] seq_lens not None,
    const int32_t[::1] last_tokens not None,
    int32_t vocab_size,
    int32_t[::1] starts_out not None,
    int32_t[::1] q_lens_out not None,
    int64_t[::1] input_ids_out not None,
    int32_t[::1] parents_out not None,
    int32_t[::1] node_cu_out not None,
    int64_t[::1] logits_index_out not None,
    int32_t[::1] depths_out not None,
):
    """Write the tokens of R rows and return (T, N, whether a row's drafts branch).

    In: the arrays of a ``StepPlan`` and its ``HostDrafts`` (None when no row has drafts);
    seq_lens, last_tokens int32 [S], the per-slot state: a verify row starts at its slot's seq_len
    with the slot's last token.

    Out, each long enough for rows + prompt tokens + drafts: starts_out, q_lens_out int32 [R];
    input_ids_out int64 [T]; parents_out int32 [T], index within the row, -1 for its first token;
    node_cu_out int32 [R + 1] and logits_index_out int64 [N], the nodes by row and their places
    among the T; depths_out int32 [R], depth of the row's draft tree.

    Raises ValueError naming the row. The outputs are undefined after an error.
    """
    cdef Py_ssize_t rows = slots.shape[0]
    cdef Py_ssize_t drafts = 0 if draft_tokens is None else draft_tokens.shape[0]
    cdef Py_ssize_t capacity = rows + tokens.shape[0] + drafts
    cdef RowReport report
    cdef Taken taken
    cdef PlanRows plan
    cdef SlotStates states
    cdef LaidRows out
    need("kinds", kinds.shape[0], rows)
    need("q_caps", q_caps.shape[0], rows)
    need("starts", starts.shape[0], rows)
    need("starts_out", starts_out.shape[0], rows)
    need("q_lens_out", q_lens_out.shape[0], rows)
    need("node_cu_out", node_cu_out.shape[0], rows + 1)
    need("depths_out", depths_out.shape[0], rows)
    need("last_tokens", last_tokens.shape[0], seq_lens.shape[0])
    need("input_ids_out", input_ids_out.shape[0], capacity)
    need("parents_out", parents_out.shape[0], capacity)
    need("logits_index_out", logits_index_out.shape[0], capacity)
    plan.counts = plan.room = plan.draft_tokens = plan.draft_parents = NULL
    if counts is not None:
        if draft_tokens is None or draft_parents is None:
            raise ValueError("counts came without draft_tokens and draft_parents")
        need("counts", counts.shape[0], rows)
        need("draft_parents", draft_parents.shape[0], drafts)
        plan.counts = &counts[0]
        plan.draft_tokens = &draft_tokens[0]
        plan.draft_parents = &draft_parents[0]
    plan.rows, plan.num_tokens, plan.num_drafts = rows, tokens.shape[0], drafts
    plan.slots, plan.kinds, plan.q_caps = &slots[0], &kinds[0], &q_caps[0]
    plan.starts, plan.tokens = &starts[0], &tokens[0]
    states.slots = seq_lens.shape[0]
    states.lengths, states.last = &seq_lens[0], &last_tokens[0]
    out.starts, out.q_lens, out.depths = &starts_out[0], &q_lens_out[0], &depths_out[0]
    out.ids, out.parents = &input_ids_out[0], &parents_out[0]
    out.node_cu, out.index = &node_cu_out[0], &logits_index_out[0]
    refuse(
        lay_rows(&report, &taken, &plan, &states, vocab_size, &out), &report, &taken, &plan
    )
    return taken.tokens, taken.nodes, bool(taken.branches)
