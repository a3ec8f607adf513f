# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Per-slot columns of running requests: lengths, bounds and page-table rows.

While a row is in flight the host knows a request's length only within
`length .. length + emits`; every bound below is taken at the upper end, where a row's bonus token
stands at position `length + emits - 1`.

A drafter with KV of its own writes it ahead: a verify row that drafts may touch `draft_reach`
tokens from its first on, although it verifies fewer of them.
"""

from array import array
from collections import namedtuple

cimport cython
from cpython cimport array as c_array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from .int32_bytes cimport int32_data
from .page_allocator cimport PageAllocator

import numpy as np

DecodeRows = namedtuple(
    "DecodeRows",
    ("slots", "q_caps", "page_slots", "page_indexes", "page_ids", "held_back"),
    module=__name__,
)
SlotState = namedtuple(
    "SlotState",
    ("length", "max_total", "target", "filled", "emits", "held", "last_step", "reach"),
    module=__name__,
)
FastCommit = namedtuple(
    "FastCommit",
    ("slow_rows", "verify_rows", "proposed", "correct", "verify_tokens", "plain_rows", "tokens"),
    module=__name__,
)
RowCounts = namedtuple(
    "RowCounts",
    ("verify_ct", "verify_tokens", "correct", "proposed", "plain_ct", "reason", "histogram"),
    module=__name__,
)

cdef enum:
    PREFILL = 0
    PREFILL_LAST = 1
    VERIFY = 2


cdef Py_ssize_t int32_count(bytes data, str name) except -1:
    if PyBytes_GET_SIZE(data) % sizeof(int32_t):
        raise ValueError(f"{name} has {len(data)} bytes, which is no whole number of int32")
    return PyBytes_GET_SIZE(data) // <Py_ssize_t>sizeof(int32_t)


def check_result(
    bytes kinds not None,
    bytes q_caps not None,
    bytes accept_lens not None,
    bytes tokens not None,
    bytes proposed not None,
    bytes depths not None,
    frozenset error_rows not None,
    int32_t vocab_size,
):
    """Raise ValueError saying what a step's result breaks of its contract (see StepResult).

    `kinds` and `q_caps` are the plan's; all are int32 buffers but `kinds`, which is uint8.
    """
    cdef Py_ssize_t row, i, rows = PyBytes_GET_SIZE(kinds)
    cdef Py_ssize_t count = int32_count(tokens, "tokens")
    cdef const uint8_t *kind = <const uint8_t *>PyBytes_AS_STRING(kinds)
    cdef const int32_t *emits = int32_data(accept_lens)
    cdef const int32_t *drafts = int32_data(proposed)
    cdef const int32_t *caps = int32_data(q_caps)
    cdef const int32_t *depth = int32_data(depths)
    cdef const int32_t *token = int32_data(tokens)
    cdef int64_t total = 0
    cdef int32_t least, most
    if not (
        int32_count(accept_lens, "accept_lens") == int32_count(proposed, "proposed")
        == int32_count(depths, "depths") == rows
    ):
        raise ValueError(f"the result does not have the plan's {rows} rows")
    for row in range(rows):
        least = 0 if kind[row] == PREFILL else 1
        most = drafts[row] + 1 if kind[row] == VERIFY else least
        if not 0 <= depth[row] <= drafts[row] or drafts[row] >= max(1, caps[row]):
            raise ValueError(f"row {row} verified {drafts[row]} drafts, {depth[row]} deep")
        if kind[row] != VERIFY and drafts[row] != 0:
            raise ValueError(f"prefill row {row} verified {drafts[row]} drafts")
        if error_rows and row in error_rows:
            least = most = 0
        if not least <= emits[row] <= most:
            raise ValueError(f"row {row} emits {emits[row]} tokens")
        total += emits[row]
    if total != count:
        raise ValueError(f"rows emit {total} tokens and {count} came")
    for i in range(count):
        if not 0 <= token[i] < vocab_size:
            raise ValueError(f"token {token[i]} is outside the vocabulary")


def note_unmatched(
    bytes proposed not None, uint8_t[::1] reasons not None, Py_ssize_t rows, uint8_t code
):
    """Give those of the first `rows` rows that have no reason yet and no drafts the reason `code`.

    `proposed` int32 [R] and `reasons` [R].
    """
    cdef Py_ssize_t row
    cdef const int32_t *drafts = int32_data(proposed)
    if not 0 <= rows <= min(int32_count(proposed, "proposed"), reasons.shape[0]):
        raise ValueError(f"{rows} rows, proposed and reasons have fewer")
    for row in range(rows):
        if drafts[row] == 0 and reasons[row] == 0:
            reasons[row] = code


@cython.final
cdef class _Ints:
    """Growing int32 buffer whose memory is kept from step to step."""

    def __dealloc__(self):
        free(self.data)

    cdef int push(self, int32_t value) except -1:
        cdef int32_t *data
        if self.size == self.room:
            data = <int32_t *>realloc(self.data, (2 * self.room + 64) * sizeof(int32_t))
            if data is NULL:
                raise MemoryError("no memory for the rows of a step")
            self.data = data
            self.room = 2 * self.room + 64
        self.data[self.size] = value
        self.size += 1
        return 0

    cdef bytes take(self):
        """The contents as bytes; the buffer is empty afterwards."""
        cdef bytes out = PyBytes_FromStringAndSize(
            <char *>self.data, self.size * <Py_ssize_t>sizeof(int32_t)
        )
        self.size = 0
        return out


@cython.final
cdef class RequestTable:
    """What planning and commit touch for every row of every step.

    `draft_reach`: tokens from a row's first on that a drafter with KV of its own may write, 0 to
    65; 0 for one without. A slot index out of range or not open raises ValueError in every method.
    """

    def __cinit__(self, int32_t max_slots, int32_t page_size, int32_t draft_reach=0):
        if max_slots < 1 or page_size < 1:
            raise ValueError(f"max_slots {max_slots} and page_size {page_size} must be 1 or more")
        if not 0 <= draft_reach <= MAX_QUERY:
            raise ValueError(f"draft_reach is {draft_reach}: give 0 to {<int>MAX_QUERY} tokens")
        self._max_slots = max_slots
        self._page_size = page_size
        self._draft_reach = draft_reach
        self._entries = <Entry *>calloc(max_slots, sizeof(Entry))
        if self._entries is NULL:
            raise MemoryError(f"no memory for {max_slots} slots")
        self._rids = [None] * max_slots
        self._sinks = [None] * max_slots
        self._tokens = [None] * max_slots
        self._slots = _Ints()
        self._q_caps = _Ints()
        self._page_slots = _Ints()
        self._page_indexes = _Ints()
        self._page_ids = _Ints()

    def __dealloc__(self):
        cdef int32_t i
        if self._entries is not NULL:
            for i in range(self._max_slots):
                free(self._entries[i].pages)
                free(self._entries[i].stops)
        free(self._entries)

    cdef Entry *_entry(self, int64_t slot) except NULL:
        if slot < 0 or slot >= self._max_slots or not self._entries[slot].open:
            raise ValueError(f"slot {slot} is not open")
        return &self._entries[slot]

    cdef int _append_page(self, Entry *entry, int32_t page) except -1:
        cdef int32_t *pages
        if entry.held == entry.room:
            pages = <int32_t *>realloc(entry.pages, (2 * entry.room + 8) * sizeof(int32_t))
            if pages is NULL:
                raise MemoryError("no memory for a page-table row")
            entry.pages = pages
            entry.room = 2 * entry.room + 8
        entry.pages[entry.held] = page
        entry.held += 1
        return 0

    cdef int32_t _width(self, Entry *entry, int32_t cap) noexcept nogil:
        """Query tokens of the next verify row: none once the row in flight must end the request."""
        cdef int32_t left = entry.max_total - entry.length - (1 if entry.emits > 0 else 0)
        return max(0, min(cap, left))

    cdef int32_t _reach(self, int32_t width) noexcept nogil:
        """Tokens from its first on that a verify row of `width` tokens may write."""
        return max(width, self._draft_reach if width > 1 else 0)

    cdef int32_t _lacks(self, Entry *entry, int32_t width) noexcept nogil:
        """Pages missing for a verify row of `width` tokens, wherever it will start."""
        cdef int32_t end = entry.length + entry.emits - 1 + self._reach(width)
        return max(0, (end + self._page_size - 1) // self._page_size - entry.held)

    @property
    def max_slots(self):
        """Slots, open or not."""
        return self._max_slots

    def open(
        self,
        int32_t slot,
        int32_t length,
        int32_t max_total,
        const int32_t[::1] pages not None,
        int32_t filled,
        bint sure_length,
        bint drafts,
    ):
        """Put a request of `length` known tokens with its pages (int32 [n]) into a slot.

        The KV of the first `filled` tokens is in place. At `max_total` tokens the request ends;
        with `sure_length` it is known to get there. `drafts`: it may have some. Raises ValueError
        for an open slot, and where the pages do not hold the tokens.
        """
        cdef Py_ssize_t i
        cdef Entry *entry
        if slot < 0 or slot >= self._max_slots:
            raise ValueError(f"slot {slot} is outside 0..{self._max_slots - 1}")
        if self._entries[slot].open:
            raise ValueError(f"slot {slot} is open already")
        if not 0 <= filled < length <= max_total:
            raise ValueError(f"filled {filled}, length {length}, max_total {max_total} must ascend")
        if pages.shape[0] * <int64_t>self._page_size < length:
            raise ValueError(f"{pages.shape[0]} pages cannot hold {length} tokens")
        entry = &self._entries[slot]
        entry.open = True
        entry.sure_length = sure_length
        entry.drafts = drafts
        entry.length = length
        entry.max_total = max_total
        entry.target = length
        entry.filled = filled
        entry.emits = 0
        entry.reach = 0
        entry.held = 0
        entry.last_step = 0
        entry.fast = False
        for i in range(pages.shape[0]):
            self._append_page(entry, pages[i])

    def close(self, int32_t slot):
        """Forget the request; its pages are the caller's to free."""
        self._entry(slot).open = False
        self._rids[slot] = self._sinks[slot] = self._tokens[slot] = None

    def is_open(self, int32_t slot):
        """Whether the slot holds a request."""
        return 0 <= slot < self._max_slots and self._entries[slot].open

    def state(self, int32_t slot):
        """Columns of an open slot."""
        cdef Entry *e = self._entry(slot)
        return SlotState(
            e.length, e.max_total, e.target, e.filled, e.emits, e.held, e.last_step, e.reach
        )

    def last_step(self, int32_t slot):
        """Newest step that has a row of this slot; 0 when none had."""
        return self._entry(slot).last_step

    def length(self, int32_t slot):
        """Committed tokens, the prompt included."""
        return self._entry(slot).length

    def held(self, int32_t slot):
        """Pages in the slot's page-table row."""
        return self._entry(slot).held

    def pages(self, int32_t slot):
        """The slot's page-table row, int32 [held], a copy."""
        cdef Entry *entry = self._entry(slot)
        cdef int32_t i
        out = np.empty(entry.held, np.int32)
        cdef int32_t[::1] view = out
        for i in range(entry.held):
            view[i] = entry.pages[i]
        return out

    def unfilled(self, int32_t slot):
        """Tokens that prefill has yet to plan."""
        cdef Entry *entry = self._entry(slot)
        return entry.target - entry.filled

    def valid_kv(self, int32_t slot):
        """Leading tokens whose KV is right once no row is in flight.

        The newest token of a decoding request has none yet.
        """
        cdef Entry *entry = self._entry(slot)
        if entry.filled < entry.target:
            return entry.filled
        return max(entry.target, entry.length - 1)

    def decodable(self, const int32_t[::1] slots not None, int32_t limit):
        """Those of the slots (int32 [n]) whose row in flight, if any, need not end the request.

        Returns them as int32 [k], with the most drafts, up to `limit`, of the next row of each,
        int32 [k]: those that the length cap leaves beside the bonus token, or -1 for a request
        that wants none.
        """
        cdef Py_ssize_t i, n = 0
        cdef int32_t width
        cdef Entry *entry
        out, room = np.empty(slots.shape[0], np.int32), np.empty(slots.shape[0], np.int32)
        cdef int32_t[::1] slot_view = out
        cdef int32_t[::1] room_view = room
        for i in range(slots.shape[0]):
            entry = self._entry(slots[i])
            width = self._width(entry, limit + 1)
            if width > 0:
                slot_view[n] = slots[i]
                room_view[n] = width - 1 if entry.drafts else -1
                n += 1
        if n == slots.shape[0]:
            return out, room
        return out[:n], room[:n]

    def bind_room(
        self, const int32_t[::1] slots not None, const int32_t[::1] q_caps not None
    ):
        """Drafts that each slot's newest row of `q_caps` (int32 [n]) tokens may hold, int32 [n].

        To be asked when all earlier results are in. None for a request that ended.
        """
        cdef Py_ssize_t i
        cdef Entry *entry
        out = np.empty(slots.shape[0], np.int32)
        cdef int32_t[::1] view = out
        for i in range(slots.shape[0]):
            entry = self._entry(slots[i])
            view[i] = 0
            if entry.drafts:
                view[i] = max(0, min(q_caps[i], entry.max_total - entry.length) - 1)
        return out

    def attach(
        self,
        int32_t slot,
        str rid not None,
        sink not None,
        const int32_t[::1] stop_ids not None,
        bint stream,
    ):
        """Let `commit_fast` commit this slot's plain rows into `sink.tokens`, an array('i').

        To be called only if nothing but the cap and `stop_ids` (int32 [n]) can end the request.
        """
        cdef Entry *entry = self._entry(slot)
        cdef int32_t *stops = NULL
        cdef Py_ssize_t i, count = stop_ids.shape[0]
        if not isinstance(sink.tokens, array) or sink.tokens.typecode != "i":
            raise ValueError("the sink's tokens must be an array of type 'i'")
        if count:
            stops = <int32_t *>malloc(count * sizeof(int32_t))
            if stops is NULL:
                raise MemoryError("no memory for stop tokens")
        for i in range(count):
            stops[i] = stop_ids[i]
        free(entry.stops)
        entry.stops = stops
        entry.num_stops = <int32_t>count
        entry.stream = stream
        entry.fast = True
        self._rids[slot] = rid
        self._sinks[slot] = sink
        self._tokens[slot] = sink.tokens
        self._clear_counts(entry)

    def detach(self, int32_t slot):
        """The request ends or leaves: no fast commits and no drafts for its rows in flight."""
        cdef Entry *entry = self._entry(slot)
        entry.fast = False
        entry.drafts = False

    cdef void _clear_counts(self, Entry *entry) noexcept nogil:
        entry.verify_ct = entry.verify_tokens = entry.correct = entry.proposed = 0
        entry.plain_ct = entry.reason = 0
        memset(entry.histogram, 0, sizeof(entry.histogram))

    def take_counts(self, int32_t slot):
        """Counts of the rows that `commit_fast` committed since the last call."""
        cdef Entry *e = self._entry(slot)
        cdef Py_ssize_t i, used = 0
        for i in range(MAX_QUERY):
            if e.histogram[i]:
                used = i + 1
        counts = RowCounts(
            e.verify_ct, e.verify_tokens, e.correct, e.proposed, e.plain_ct, e.reason,
            [e.histogram[i] for i in range(used)],
        )
        self._clear_counts(e)
        return counts

    cdef bint _is_plain(self, Entry *entry, const int32_t *run, int32_t length) noexcept nogil:
        """Whether the run neither reaches the cap nor holds a stop token."""
        cdef int32_t i, j
        if entry.length + length >= entry.max_total:
            return False
        for i in range(length):
            for j in range(entry.num_stops):
                if run[i] == entry.stops[j]:
                    return False
        return True

    def commit_fast(
        self,
        int64_t step,
        bytes slots not None,
        bytes kinds not None,
        bytes accept_lens not None,
        bytes tokens not None,
        bytes proposed not None,
        bytes depths not None,
        const uint8_t[::1] reasons not None,
        int64_t[::1] accepted_per_pos not None,
        int64_t[::1] drafted_per_pos not None,
    ):
        """Commit all verify rows that cannot end their request; list the others' indexes.

        The buffers (int32, `kinds` uint8) passed `check_result`; `reasons` [R] says why a row had
        no drafts. `*_per_pos` [64] are added to.
        """
        cdef Py_ssize_t row, at = 0, i, rows = PyBytes_GET_SIZE(kinds)
        cdef int64_t verify_rows = 0, drafts = 0, right = 0, kept = 0, plain = 0, emitted = 0
        cdef const int32_t *slot = int32_data(slots)
        cdef const int32_t *emits = int32_data(accept_lens)
        cdef const int32_t *drafted = int32_data(proposed)
        cdef const int32_t *depth = int32_data(depths)
        cdef const uint8_t *kind = <const uint8_t *>PyBytes_AS_STRING(kinds)
        cdef const int32_t *run
        cdef int32_t length
        cdef Entry *entry
        slow = []
        if int32_count(slots, "slots") != rows or reasons.shape[0] != rows:
            raise ValueError(f"slots and reasons do not have the plan's {rows} rows")
        if accepted_per_pos.shape[0] < MAX_QUERY - 1 or drafted_per_pos.shape[0] < MAX_QUERY - 1:
            raise ValueError(f"the counts per position need {MAX_QUERY - 1} places")
        for row in range(rows):
            entry = self._entry(slot[row])
            length = emits[row]
            run = int32_data(tokens) + at
            at += length
            if (
                not entry.fast or kind[row] != VERIFY or length == 0
                or not self._is_plain(entry, run, length)
            ):
                slow.append(row)
                continue
            c_array.extend_buffer(<c_array.array>self._tokens[slot[row]], <char *>run, length)
            entry.length += length
            emitted += length
            if entry.last_step == step:
                entry.emits = entry.reach = 0
            if drafted[row] == 0:
                plain += 1
                entry.plain_ct += 1
                if reasons[row]:
                    entry.reason = reasons[row]
                continue
            entry.verify_ct += 1
            entry.verify_tokens += length
            entry.correct += length - 1
            entry.proposed += drafted[row]
            entry.histogram[length - 1] += 1
            verify_rows += 1
            drafts += drafted[row]
            right += length - 1
            kept += length
            for i in range(depth[row]):
                drafted_per_pos[i] += 1
            for i in range(length - 1):
                accepted_per_pos[i] += 1
        return FastCommit(slow, verify_rows, drafts, right, kept, plain, emitted)

    def stream_outputs(self, bytes slots not None, list skip not None, int interval, make not None):
        """make(rid, new tokens as bytes, ()) for each slot (int32 buffer) whose stream is due.

        Rows whose indexes `skip` lists, ascending, are left out. The first tokens of a stream are
        due at once, the next after `interval` tokens.
        """
        cdef Py_ssize_t row, sent, have, skipped = 0, rows = int32_count(slots, "slots")
        cdef int32_t slot
        cdef c_array.array tokens
        out = []
        for row in range(rows):
            if skipped < len(skip) and skip[skipped] == row:
                skipped += 1
                continue
            slot = int32_data(slots)[row]
            if not self._entry(slot).stream:
                continue
            sink = self._sinks[slot]
            tokens = <c_array.array>self._tokens[slot]
            sent = sink.sent
            have = len(tokens)
            if have == sent or (sent > 0 and have - sent < interval):
                continue
            sink.sent = have
            out.append(make(self._rids[slot], PyBytes_FromStringAndSize(
                <char *>&tokens.data.as_ints[sent], (have - sent) * <Py_ssize_t>sizeof(int32_t)
            ), ()))
        return out

    def plan_chunk(self, int32_t slot, int32_t count, int64_t step, int32_t emits):
        """Plan `count` more prefill tokens; return the first one's position.

        `emits` is 1 for the last chunk of a request that generates, else 0.
        """
        cdef Entry *entry = self._entry(slot)
        cdef int32_t start = entry.filled
        if not 0 < count <= entry.target - start:
            raise ValueError(f"a chunk of {count} tokens; {entry.target - start} are left")
        if step <= entry.last_step:
            raise ValueError(f"step {step} is not after step {entry.last_step}")
        entry.filled += count
        entry.emits = emits
        entry.last_step = step
        return start

    def settle(self, int32_t slot, int32_t kept, int64_t step):
        """Account for the result of this slot's row of `step`, which kept `kept` tokens."""
        cdef Entry *entry = self._entry(slot)
        if kept < 0 or entry.length + kept > entry.max_total:
            raise ValueError(f"{kept} more tokens exceed the cap of {entry.max_total}")
        entry.length += kept
        if entry.last_step == step:
            entry.emits = entry.reach = 0

    def expected_pages(self, const int32_t[::1] slots not None, double ratio, int32_t clip):
        """Pages that the requests may still ask for, `ratio` of what they could at most.

        At most `clip` tokens of each are looked at; a request that surely uses all of its cap
        counts in full. One that may draft needs pages for its drafter's reach too.
        """
        cdef Py_ssize_t i
        cdef int64_t total = 0
        cdef int32_t end
        cdef Entry *entry
        for i in range(slots.shape[0]):
            entry = self._entry(slots[i])
            end = min(entry.max_total - entry.length, clip)
            if not entry.sure_length:
                end = <int32_t>(end * ratio)
            end += entry.length + (self._draft_reach if entry.drafts else 0)
            end = (end + self._page_size - 1) // self._page_size
            total += max(0, end - entry.held)
        return total

    def lacking_pages(
        self, const int32_t[::1] slots not None, const int32_t[::1] caps not None
    ):
        """Pages that `plan_decode` would take for these rows."""
        cdef Py_ssize_t i
        cdef int64_t total = 0
        cdef int32_t width
        cdef Entry *entry
        for i in range(slots.shape[0]):
            entry = self._entry(slots[i])
            width = self._width(entry, caps[i])
            if width > 0:
                total += self._lacks(entry, width)
        return total

    def plan_decode(
        self,
        int64_t step,
        const int32_t[::1] slots not None,
        const int32_t[::1] caps not None,
        PageAllocator allocator not None,
    ):
        """Plan a verify row for each slot (int32 [n]) of at most `caps` (int32 [n]) tokens.

        A slot gets no row when the one in flight must end its request, and is held back when the
        allocator lacks pages for it. Rows keep the order of `slots`.
        """
        cdef Py_ssize_t i
        cdef int32_t width, lacks, held_back = 0
        cdef Entry *entry
        for i in range(slots.shape[0]):
            entry = self._entry(slots[i])
            if step <= entry.last_step:
                raise ValueError(f"step {step} is not after step {entry.last_step}")
            width = self._width(entry, caps[i])
            if width == 0:
                continue
            lacks = self._lacks(entry, width)
            if lacks > allocator._top:
                held_back += 1
                continue
            while lacks > 0:
                self._page_slots.push(slots[i])
                self._page_indexes.push(entry.held)
                self._append_page(entry, allocator.take())
                self._page_ids.push(entry.pages[entry.held - 1])
                lacks -= 1
            entry.begin = entry.length - (0 if entry.emits > 0 else 1)
            entry.end = entry.length + entry.emits - 1 + width
            entry.emits = width
            entry.reach = self._reach(width)
            entry.last_step = step
            self._slots.push(slots[i])
            self._q_caps.push(width)
        return DecodeRows(
            self._slots.take(), self._q_caps.take(), self._page_slots.take(),
            self._page_indexes.take(), self._page_ids.take(), held_back,
        )

    def corrupt_for_test(self, int32_t slot, str kind):
        """Damage the state so that a test can see a checker notice.

        Kinds: "length", "page" (the first becomes the last), "held" (loses the last page),
        "swap" (the last two trade places), "filled", "emits", "reach", "max_total".
        """
        cdef Entry *entry = self._entry(slot)
        if kind == "length":
            entry.length += 1
        elif kind == "page":
            entry.pages[0] = entry.pages[entry.held - 1]
        elif kind == "swap":
            entry.pages[entry.held - 1], entry.pages[entry.held - 2] = (
                entry.pages[entry.held - 2], entry.pages[entry.held - 1]
            )
        elif kind == "held":
            entry.held -= 1
        elif kind == "filled":
            entry.filled = entry.target + 1
        elif kind == "emits":
            entry.emits += 1
        elif kind == "reach":
            entry.reach += 64 * self._page_size
        elif kind == "max_total":
            entry.max_total = entry.length - 1
        else:
            raise ValueError(f"unknown kind of damage {kind!r}")
