# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""A step's rows on their way to a device: laid out, written to one block of int32, and answered.

The host does not know where verify rows start nor with which token; the device does.
"""

from collections import namedtuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cython cimport final
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from .int32_bytes cimport int32_data
from .step_rows cimport LaidRows, PlanRows, RowReport, SlotStates, Taken, lay_rows, refuse

import numpy as np

StepAnswer = namedtuple(
    "StepAnswer",
    ("lens", "tokens", "proposed", "depths", "confidence", "trimmed", "silent"),
    module=__name__,
)

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
    ACCEPT_CAPS = 16
    BUDGET = 17
    FIELDS = 18


cdef inline int32_t *int32_room(bytes data) noexcept:
    """Of bytes that were just made."""
    return <int32_t*>PyBytes_AS_STRING(data)


cdef inline Py_ssize_t int32_count(bytes data) noexcept:
    return PyBytes_GET_SIZE(data) // <Py_ssize_t>sizeof(int32_t)


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


cdef int need(str name, Py_ssize_t given, Py_ssize_t count) except -1:
    if given != count:
        raise ValueError(f"{name}: {count} are needed, {given} given")
    return 0


cdef int fits(str name, Py_ssize_t count, Py_ssize_t room) except -1:
    if count > room:
        raise ValueError(f"{name}: {count} are needed, there is room for {room}")
    return 0


@final
cdef class PackedRows:
    cdef readonly Py_ssize_t rows, tokens, nodes, verify_rows, longest, device_drafts
    cdef bytes _slots, _kinds, _starts, _counts
    cdef LaidRows laid
    cdef int32_t *room_of           # [rows], NULL where the device drafts nothing
    cdef int32_t *cu_q              # [rows + 1]
    cdef void *memory

    def __init__(
        self,
        bytes slots not None,
        bytes kinds not None,
        bytes q_caps not None,
        bytes starts not None,
        bytes tokens not None,
        int32_t max_slots,
        int32_t vocab_size,
        bint on_device=False,
        bytes counts=None,
        bytes draft_tokens=None,
        bytes draft_parents=None,
        bytes device_caps=None,
    ):
        cdef Py_ssize_t rows = PyBytes_GET_SIZE(kinds), most
        cdef RowReport report
        cdef Taken taken
        cdef PlanRows plan
        cdef SlotStates states
        need("slots", int32_count(slots), rows)
        need("q_caps", int32_count(q_caps), rows)
        need("starts", int32_count(starts), rows)
        plan.rows = self.rows = rows
        plan.slots, plan.q_caps = int32_data(slots), int32_data(q_caps)
        plan.kinds = <const uint8_t*>PyBytes_AS_STRING(kinds)
        plan.starts, plan.tokens = int32_data(starts), int32_data(tokens)
        plan.num_tokens = int32_count(tokens)
        plan.counts = plan.draft_tokens = plan.draft_parents = NULL
        plan.num_drafts = 0
        if counts is not None:
            if draft_tokens is None or draft_parents is None:
                raise ValueError("counts came without draft_tokens and draft_parents")
            need("counts", int32_count(counts), rows)
            plan.num_drafts = int32_count(draft_tokens)
            need("draft_parents", int32_count(draft_parents), plan.num_drafts)
            plan.counts = int32_data(counts)
            plan.draft_tokens, plan.draft_parents = (
                int32_data(draft_tokens), int32_data(draft_parents)
            )
        self._slots, self._kinds, self._starts, self._counts = slots, kinds, starts, counts
        self.device_drafts = self.count_room(&plan, on_device, device_caps)
        most = rows + plan.num_tokens + plan.num_drafts + self.device_drafts
        self.allocate(rows, most)
        plan.room = NULL
        if self.device_drafts:
            self.write_room(&plan, device_caps)
            plan.room = self.room_of
        states.slots = max_slots
        states.lengths = states.last = NULL
        refuse(
            lay_rows(&report, &taken, &plan, &states, vocab_size, &self.laid),
            &report, &taken, &plan,
        )
        self.tokens, self.nodes = taken.tokens, taken.nodes
        self.tally(plan.kinds)

    def __dealloc__(self):
        free(self.memory)

    cdef int64_t count_room(
        self, const PlanRows *plan, bint on_device, bytes device_caps
    ) except -1:
        """Drafts that the device makes of all rows together."""
        cdef Py_ssize_t row, given = 0 if device_caps is None else int32_count(device_caps)
        cdef int64_t total = 0
        cdef const int32_t *caps = NULL
        if plan.counts is NULL:
            if on_device:
                for row in range(plan.rows):
                    if plan.kinds[row] == VERIFY:
                        total += max(0, plan.q_caps[row] - 1)
            return total
        if given:
            caps = int32_data(device_caps)
        for row in range(given):
            if caps[row] < 0 or (caps[row] and (given != plan.rows or plan.counts[row])):
                raise ValueError("device_caps: one a row, and 0 for rows that have drafts")
            total += caps[row]
        if total and not on_device:
            raise ValueError("the drafts leave rows to the device, which has no drafter")
        return total

    cdef void write_room(self, const PlanRows *plan, bytes device_caps) noexcept:
        cdef Py_ssize_t row
        for row in range(plan.rows):
            if plan.counts is not NULL:
                self.room_of[row] = int32_data(device_caps)[row]
            elif plan.kinds[row] == VERIFY:
                self.room_of[row] = max(0, plan.q_caps[row] - 1)
            else:
                self.room_of[row] = 0

    cdef int allocate(self, Py_ssize_t rows, Py_ssize_t most) except -1:
        """One piece of memory for all that is laid out of so many rows and tokens at most."""
        cdef Py_ssize_t wide = 2 * most * <Py_ssize_t>sizeof(int64_t)
        cdef int32_t *rest
        self.memory = malloc(wide + (most + 6 * rows + 2) * <Py_ssize_t>sizeof(int32_t))
        if self.memory is NULL:
            raise MemoryError("no memory for a step's rows")
        self.laid.ids = <int64_t*>self.memory
        self.laid.index = self.laid.ids + most
        rest = <int32_t*>(self.laid.index + most)
        self.laid.parents = rest
        self.laid.starts = rest + most
        self.laid.q_lens = self.laid.starts + rows
        self.laid.depths = self.laid.q_lens + rows
        self.laid.node_cu = self.laid.depths + rows
        self.cu_q = self.laid.node_cu + rows + 1
        self.room_of = NULL
        if self.device_drafts:
            self.room_of = self.cu_q + rows + 1
        return 0

    cdef void tally(self, const uint8_t *kinds) noexcept:
        cdef Py_ssize_t row
        cdef int32_t total = 0
        self.verify_rows = self.longest = 0
        self.cu_q[0] = 0
        for row in range(self.rows):
            total += self.laid.q_lens[row]
            self.cu_q[row + 1] = total
            if kinds[row] != VERIFY:
                self.longest = max(self.longest, self.laid.q_lens[row])
            elif self.verify_rows == row:
                self.verify_rows += 1
            else:
                self.verify_rows = -1

    @property
    def decode_only(self):
        return self.verify_rows == self.rows

    @property
    def prefill_tokens(self):
        return self.tokens - self.cu_q[max(0, self.verify_rows)]

    @property
    def slots(self):
        return np.frombuffer(self._slots, np.int32)

    @property
    def kinds(self):
        return np.frombuffer(self._kinds, np.uint8)

    @property
    def caps(self):
        return None if self.room_of is NULL else array_of(self.room_of, self.rows)

    @property
    def q_lens(self):
        return array_of(self.laid.q_lens, self.rows)

    @property
    def node_cu(self):
        return array_of(self.laid.node_cu, self.rows + 1)

    @property
    def depths(self):
        return array_of(self.laid.depths, self.rows)

    def fill(
        self,
        int32_t[::1] block not None,
        const int64_t[::1] edges not None,
        int32_t spare_slot,
        Py_ssize_t gap,
        bytes page_slots not None,
        bytes page_columns not None,
        bytes page_ids not None,
        const int32_t[:, ::1] entries,
        bytes accept_caps not None,
        int32_t budget,
    ):
        cdef Py_ssize_t rows = self.rows, tokens = self.tokens, nodes = self.nodes, i
        cdef Py_ssize_t leading = max(0, self.verify_rows), updates = int32_count(page_slots)
        cdef Py_ssize_t entered = 0 if entries is None else entries.shape[0]
        cdef Py_ssize_t capped = int32_count(accept_caps)
        cdef Py_ssize_t row_room, token_room, update_room, entry_room
        cdef const uint8_t *kinds = <const uint8_t*>PyBytes_AS_STRING(self._kinds)
        cdef int32_t *out
        if edges.shape[0] != FIELDS + 1 or block.shape[0] < edges[FIELDS] or edges[0] < 0:
            raise ValueError(f"the block of {block.shape[0]} does not hold its {FIELDS} fields")
        for i in range(FIELDS):
            if edges[i + 1] < edges[i]:
                raise ValueError("edges descend")
        out = &block[0]
        row_room, token_room = edges[KINDS] - edges[SLOTS], edges[PARENTS] - edges[TOKENS]
        update_room = edges[UPDATE_COLUMNS] - edges[UPDATE_SLOTS]
        entry_room = edges[ENTRY_LENS] - edges[ENTRY_SLOTS]
        for i in (KINDS, STARTS, CAPS, ACCEPT_CAPS):
            fits("row field", row_room, edges[i + 1] - edges[i])
        for i in (CU_Q, NODE_CU):
            fits("prefix sums", row_room + 1, edges[i + 1] - edges[i])
        for i in (PARENTS, NODE_INDEX):
            fits("token field", token_room, edges[i + 1] - edges[i])
        for i in (UPDATE_COLUMNS, UPDATE_PAGES):
            fits("update field", update_room, edges[i + 1] - edges[i])
        for i in (ENTRY_LENS, ENTRY_OUTS):
            fits("entry field", entry_room, edges[i + 1] - edges[i])
        fits("counts", 2, edges[COUNTS + 1] - edges[COUNTS])
        fits("budget", 1, edges[BUDGET + 1] - edges[BUDGET])
        if gap < 0:
            raise ValueError(f"{gap} rows of padding cannot stand between rows")
        fits("rows and the padding between them", rows + gap, row_room)
        fits("tokens", tokens, token_room)
        need("page_columns", int32_count(page_columns), updates)
        need("page_ids", int32_count(page_ids), updates)
        fits("page updates", updates, update_room)
        fits("entries", entered, entry_room)
        fits("accept_caps", capped, rows)
        if entered and entries.shape[1] != 3:
            raise ValueError("entries have a slot, a length and a number of outputs each")
        put_apart(
            out + edges[SLOTS], row_room, int32_data(self._slots), rows, leading, gap,
            spare_slot, spare_slot,
        )
        put_apart(
            out + edges[STARTS], row_room, int32_data(self._starts), rows, leading, gap, 0, 0
        )
        if self.room_of is NULL:
            put(out + edges[CAPS], row_room, NULL, 0, 0)
        else:
            put_apart(out + edges[CAPS], row_room, self.room_of, rows, leading, gap, 0, 0)
        for i in range(row_room):
            out[edges[KINDS] + i] = PREFILL
        for i in range(rows):
            out[edges[KINDS] + i + (0 if i < leading else gap)] = kinds[i]
        # A row of padding ends where the one before it does.
        put_apart(
            out + edges[CU_Q], row_room + 1, self.cu_q, rows + 1, leading + 1, gap,
            self.cu_q[leading], <int32_t>tokens,
        )
        put_apart(
            out + edges[NODE_CU], row_room + 1, self.laid.node_cu, rows + 1, leading + 1, gap,
            self.laid.node_cu[leading], <int32_t>nodes,
        )
        put_wide(out + edges[TOKENS], token_room, self.laid.ids, tokens, 0)
        put(out + edges[PARENTS], token_room, self.laid.parents, tokens, -1)
        put_wide(
            out + edges[NODE_INDEX], token_room, self.laid.index, nodes,
            <int32_t>max(0, tokens - 1),
        )
        put(out + edges[UPDATE_SLOTS], update_room, int32_data(page_slots), updates, spare_slot)
        put(out + edges[UPDATE_COLUMNS], update_room, int32_data(page_columns), updates, 0)
        put(out + edges[UPDATE_PAGES], update_room, int32_data(page_ids), updates, 0)
        for i in range(entry_room):
            out[edges[ENTRY_SLOTS] + i] = entries[i, 0] if i < entered else spare_slot
            out[edges[ENTRY_LENS] + i] = entries[i, 1] if i < entered else 0
            out[edges[ENTRY_OUTS] + i] = entries[i, 2] if i < entered else 0
        out[edges[COUNTS]] = <int32_t>updates
        out[edges[COUNTS] + 1] = <int32_t>entered
        put(out + edges[ACCEPT_CAPS], row_room, int32_data(accept_caps), capped, 0)
        out[edges[BUDGET]] = budget

    def read(
        self,
        const int32_t[::1] out not None,
        Py_ssize_t room,
        Py_ssize_t width,
        Py_ssize_t gap,
        bint drafted,
        Py_ssize_t gamma,
        bint trims,
    ):
        cdef Py_ssize_t rows = self.rows, row, place, total = 0, drafting = 0
        cdef Py_ssize_t fields = (3 if drafted else 1) + width + gamma + trims
        cdef Py_ssize_t leading = max(0, self.verify_rows)
        cdef const int32_t *lens
        cdef const int32_t *grid
        cdef const int32_t *sure
        cdef const int32_t *given = NULL
        cdef const int32_t *made = NULL
        cdef const int32_t *deep = NULL
        cdef bytes kept, tokens, proposed, depths, confidence, trimmed
        cdef int32_t *emitted
        cdef int32_t count
        if gap < 0 or width < 1 or gamma < 0 or rows + gap > room or out.shape[0] < room * fields:
            raise ValueError(
                f"an output of {out.shape[0]} for {room} rows, {width} wide, does not hold {rows}"
            )
        lens = &out[0]
        grid = lens + (3 * room if drafted else room)
        sure = grid + room * width
        kept = int32_bytes(rows)
        silent = []
        for row in range(rows):
            count = lens[row + (0 if row < leading else gap)]
            if not 0 <= count <= width:
                raise ValueError(f"row {row} emits {count} tokens, {width} at most")
            if not count and self.laid.node_cu[row + 1] > self.laid.node_cu[row]:
                silent.append(row)
            int32_room(kept)[row] = count
            total += count
            drafting += self.room_of is not NULL and self.room_of[row] > 0
        tokens = int32_bytes(total)
        emitted = int32_room(tokens)
        for row in range(rows):
            count = int32_data(kept)[row]
            place = row + (0 if row < leading else gap)
            memcpy(emitted, grid + place * width, count * sizeof(int32_t))
            emitted += count
        if self._counts is not None:
            given = int32_data(self._counts)
        if drafted:
            made = lens + room
            deep = made + room
        proposed = sums(given, made, rows, leading, gap)
        depths = sums(self.laid.depths, deep, rows, leading, gap)
        confidence = trimmed = b""
        if gamma and drafting:
            confidence = int32_bytes(drafting * gamma)
            emitted = int32_room(confidence)
            for row in range(rows):
                if self.room_of[row] > 0:
                    place = row + (0 if row < leading else gap)
                    memcpy(emitted, sure + place * gamma, gamma * sizeof(int32_t))
                    emitted += gamma
        if trims:
            trimmed = sums(NULL, sure + room * gamma, rows, leading, gap)
        return StepAnswer(kept, tokens, proposed, depths, confidence, trimmed, silent)


cdef bytes int32_bytes(Py_ssize_t count):
    return PyBytes_FromStringAndSize(NULL, count * <Py_ssize_t>sizeof(int32_t))


cdef bytes sums(
    const int32_t *own, const int32_t *more, Py_ssize_t rows, Py_ssize_t leading, Py_ssize_t gap
):
    """``own`` int32[rows] and, of the rows' places, ``more``; NULL stands for zeros."""
    cdef bytes out = int32_bytes(rows)
    cdef int32_t *data = int32_room(out)
    cdef Py_ssize_t row
    for row in range(rows):
        data[row] = 0 if own is NULL else own[row]
        if more is not NULL:
            data[row] += more[row + (0 if row < leading else gap)]
    return out


cdef object array_of(const int32_t *values, Py_ssize_t count):
    """A copy, int32[count]."""
    cdef bytes data = PyBytes_FromStringAndSize(
        <const char*>values, count * <Py_ssize_t>sizeof(int32_t)
    )
    return np.frombuffer(data, np.int32)
