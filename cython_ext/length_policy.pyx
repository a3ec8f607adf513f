# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Which draft nodes to verify: learned acceptance, and the choice that emits most a second."""
from cython cimport final
from libc.stdlib cimport calloc, free
from libc.string cimport memset

import numpy as np

cdef double PRIOR_TRIES = 6.0       # weight of a cell's prior, in observations
cdef double MAX_TRIES = 800.0       # a cell halves its counts here, so that it follows the traffic
cdef double SLOT_PRIOR = 5.0        # weight of "this request is like the others", in levels
cdef double SLOT_DECAY = 0.96       # a request's own levels fade by this factor a level
cdef double SURE = 0.995            # no estimate goes above
cdef double HOPELESS = 0.01         # nodes below are never worth a token
cdef double[8] PRIOR = [0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.85, 0.9]


cdef inline int match_bucket(int match) noexcept nogil:
    if match <= 4:
        return max(match, 1) - 1
    if match <= 6:
        return 4
    if match <= 9:
        return 5
    return 6 if match <= 14 else 7


cdef inline int share_bucket(double share) noexcept nogil:
    if share < 0.25:
        return 0
    if share < 0.6:
        return 1
    return 2 if share < 0.95 else 3


cdef inline double share_middle(int bucket) noexcept nogil:
    if bucket == 0:
        return 0.15
    if bucket == 1:
        return 0.45
    return 0.8 if bucket == 2 else 1.0


def row_caps(const int[::1] room not None, int width, int refused, int full):
    cdef Py_ssize_t r, rows = room.shape[0], drafting = 0
    caps_out, reasons_out = np.empty(rows, np.int32), np.empty(rows, np.uint8)
    cdef int[::1] caps = caps_out
    cdef unsigned char[::1] reasons = reasons_out
    for r in range(rows):
        caps[r] = max(0, min(room[r], width))
        reasons[r] = 0
        if caps[r]:
            drafting += 1
        else:
            reasons[r] = <unsigned char>(refused if room[r] < 0 else full)
    return caps_out, reasons_out, drafting


cdef int check_rows(
    LengthPolicy policy, const int[::1] slots, Py_ssize_t rows, str name
) except -1:
    cdef Py_ssize_t r
    if slots.shape[0] > policy.slots:
        raise ValueError(f"slots: {slots.shape[0]} rows, but there are {policy.slots} slots")
    if rows != slots.shape[0]:
        raise ValueError(f"{name}: {rows} rows for {slots.shape[0]} slots")
    for r in range(slots.shape[0]):
        if not 0 <= slots[r] < policy.slots:
            raise ValueError(f"slots: {slots[r]} is not one of {policy.slots}")
    return 0


@final
cdef class LengthPolicy:
    def __cinit__(self, int slots, int width):
        if slots < 1 or not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"slots {slots} must be 1 or more, width {width} 1..{MAX_WIDTH}")
        self.slots = slots
        self.width = width
        cdef Py_ssize_t nodes = <Py_ssize_t>slots * width
        self.states = <SlotState*>calloc(slots, sizeof(SlotState))
        self.tokens = <int*>calloc(nodes, sizeof(int))
        self.parents = <int*>calloc(nodes, sizeof(int))
        self.cell_of = <int*>calloc(nodes, sizeof(int))
        self.survival = <float*>calloc(nodes, sizeof(float))
        self.keep = <char*>calloc(nodes, 1)
        self.order = <Item*>calloc(nodes, sizeof(Item))
        self.unsorted = <Item*>calloc(nodes, sizeof(Item))
        self.kept = <int*>calloc(slots, sizeof(int))
        if (
            self.states == NULL or self.tokens == NULL or self.parents == NULL
            or self.cell_of == NULL or self.survival == NULL or self.keep == NULL
            or self.order == NULL or self.unsorted == NULL or self.kept == NULL
        ):
            raise MemoryError("no memory for the length policy")
        cdef int i
        for i in range(slots):
            self.states[i].count = -1
        memset(self.cells, 0, sizeof(self.cells))

    def __dealloc__(self):
        free(self.states)
        free(self.tokens)
        free(self.parents)
        free(self.cell_of)
        free(self.survival)
        free(self.keep)
        free(self.order)
        free(self.unsorted)
        free(self.kept)

    def start(self, int slot):
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot: {slot} is not one of {self.slots}")
        self.states[slot].count = -1
        self.states[slot].fresh = False
        self.states[slot].hits = 0.0
        self.states[slot].expected = 0.0

    def fade(self, const int[::1] slots not None, double kept):
        cdef Py_ssize_t r
        check_rows(self, slots, slots.shape[0], "slots")
        for r in range(slots.shape[0]):
            self.states[slots[r]].hits *= kept
            self.states[slots[r]].expected *= kept

    cdef double estimate(self, int cell) noexcept nogil:
        """Acceptance of a node given its parent's; deeper levels lean on the first level's cell."""
        cdef int rank = cell % RANKS, share = (cell // RANKS) % SHARES
        cdef int match = (cell // (RANKS * SHARES)) % MATCHES
        cdef int first = cell % (CELLS // 2)
        cdef double prior = PRIOR[match] * share_middle(share)
        if rank:
            prior *= 0.7
        prior = (self.cells[first].hits + PRIOR_TRIES * prior) / (
            self.cells[first].tries + PRIOR_TRIES
        )
        if cell == first:
            return prior
        return (self.cells[cell].hits + PRIOR_TRIES * prior) / (
            self.cells[cell].tries + PRIOR_TRIES
        )

    cdef void predict(
        self, int slot, const int* tokens, const int* parents, const float* weights, int match_len
    ) noexcept nogil:
        cdef SlotState* state = &self.states[slot]
        cdef Py_ssize_t base = <Py_ssize_t>slot * self.width
        cdef double factor = (state.hits + SLOT_PRIOR) / (state.expected + SLOT_PRIOR)
        cdef double p, share, left = 1.0, path
        cdef int i, parent, rank = 0, cell
        cdef int[MAX_WIDTH + 1] depth
        depth[0] = 0
        for i in range(state.count):
            parent = parents[i]
            if i > 0 and parent == parents[i - 1]:
                rank += 1
            else:
                rank = 0
                left = SURE
            depth[i + 1] = depth[parent] + 1
            path = weights[parent - 1] if parent else 1.0
            share = weights[i] / path if path > 0.0 else 0.0
            cell = (
                match_bucket(match_len + depth[parent]) * SHARES + share_bucket(share)
            ) * RANKS + min(rank, RANKS - 1)
            if parent:
                cell += CELLS // 2
            p = min(self.estimate(cell) * factor, left)
            left -= p
            self.tokens[base + i] = tokens[i]
            self.parents[base + i] = parent
            self.cell_of[base + i] = cell
            self.survival[base + i] = <float>(
                p * (self.survival[base + parent - 1] if parent else 1.0)
            )

    def offer(
        self,
        const int[::1] slots not None,
        const int[::1] counts not None,
        const int[::1] match_lens not None,
        const int[:, ::1] tokens not None,
        const int[:, ::1] parents not None,
        const float[:, ::1] weights not None,
    ):
        cdef Py_ssize_t rows = slots.shape[0], columns = tokens.shape[1], r
        cdef int i, last
        check_rows(self, slots, counts.shape[0], "counts")
        check_rows(self, slots, match_lens.shape[0], "match_lens")
        check_rows(self, slots, tokens.shape[0], "tokens")
        check_rows(self, slots, parents.shape[0], "parents")
        check_rows(self, slots, weights.shape[0], "weights")
        if parents.shape[1] != columns or weights.shape[1] != columns:
            raise ValueError("parents and weights: must have as many columns as tokens")
        for r in range(rows):
            if not 0 <= counts[r] <= min(columns, <Py_ssize_t>self.width):
                raise ValueError(f"counts: row {r} has {counts[r]} nodes, room for {self.width}")
            last = 0
            for i in range(counts[r]):
                if parents[r, i] < last or parents[r, i] > i:
                    raise ValueError(f"parents: row {r} is not in breadth-first order")
                last = parents[r, i]
        with nogil:
            for r in range(rows):
                self.states[slots[r]].count = counts[r]
                self.states[slots[r]].fresh = True
                if counts[r]:
                    self.predict(
                        slots[r], &tokens[r, 0], &parents[r, 0], &weights[r, 0], match_lens[r]
                    )

    cdef void learn_row(self, int slot, const int* run, int length) noexcept nogil:
        """Walk the run through the tree: every child of a reached node was put to the test."""
        cdef SlotState* state = &self.states[slot]
        cdef Py_ssize_t base = <Py_ssize_t>slot * self.width
        cdef int i = 0, j, at = 0, reached
        cdef double promised
        cdef Cell* cell
        for j in range(length):
            while i < state.count and self.parents[base + i] < at:
                i += 1
            if i == state.count or self.parents[base + i] != at:
                return
            reached = 0
            promised = 0.0
            while i < state.count and self.parents[base + i] == at:
                promised += self.estimate(self.cell_of[base + i])
                cell = &self.cells[self.cell_of[base + i]]
                cell.tries += 1.0
                if self.tokens[base + i] == run[j]:
                    cell.hits += 1.0
                    reached = i + 1
                if cell.tries > MAX_TRIES:
                    cell.tries *= 0.5
                    cell.hits *= 0.5
                i += 1
            state.hits = state.hits * SLOT_DECAY + (1.0 if reached else 0.0)
            state.expected = state.expected * SLOT_DECAY + min(promised, SURE)
            if not reached:
                return
            at = reached

    def learn(
        self, const int[::1] slots not None, const int[::1] lens not None,
        const int[::1] tokens not None,
    ):
        cdef Py_ssize_t r, offset = 0
        check_rows(self, slots, lens.shape[0], "lens")
        for r in range(slots.shape[0]):
            if lens[r] < 0:
                raise ValueError(f"lens: row {r} emitted {lens[r]} tokens")
            offset += lens[r]
        if offset != tokens.shape[0]:
            raise ValueError(f"tokens: {tokens.shape[0]} for {offset} emitted")
        offset = 0
        with nogil:
            for r in range(slots.shape[0]):
                if lens[r]:
                    if self.states[slots[r]].fresh:
                        self.learn_row(slots[r], &tokens[offset], lens[r])
                        self.states[slots[r]].fresh = False
                    offset += lens[r]

    def learn_held(
        self, const int[::1] slots not None, const int[::1] caps not None,
        const int[::1] held not None,
    ):
        cdef Py_ssize_t r, base
        cdef int i, length
        cdef int[MAX_WIDTH + 1] run
        check_rows(self, slots, caps.shape[0], "caps")
        check_rows(self, slots, held.shape[0], "held")
        for r in range(slots.shape[0]):
            if not 0 <= held[r] <= caps[r] <= self.width:
                raise ValueError(
                    f"held: {held[r]} of {caps[r]} drafts in row {r}, at most {self.width}"
                )
        for r in range(slots.shape[0]):
            base = <Py_ssize_t>slots[r] * self.width
            if not self.states[slots[r]].fresh or not caps[r]:
                continue
            length = held[r]
            for i in range(length):
                run[i] = self.tokens[base + i]
            if length < caps[r]:
                run[length] = -1  # which no node has
                length += 1
            self.learn_row(slots[r], run, length)
            self.states[slots[r]].fresh = False

    cdef int gather(
        self, const int[::1] slots, const int[::1] caps, bint fresh_only
    ) noexcept nogil:
        """Sort the rows' nodes by survival, best first; a parent stays before its children."""
        cdef int[BUCKETS + 1] start
        cdef Py_ssize_t r, base
        cdef int i, found = 0, bucket
        cdef Item item
        memset(start, 0, sizeof(start))
        for r in range(slots.shape[0]):
            base = <Py_ssize_t>slots[r] * self.width
            self.kept[r] = 0
            memset(&self.keep[base], 0, self.width)
            if caps[r] <= 0 or (fresh_only and not self.states[slots[r]].fresh):
                continue
            for i in range(self.states[slots[r]].count):
                if self.survival[base + i] < HOPELESS:
                    continue
                self.unsorted[found].node = <int>(base + i)
                self.unsorted[found].row = <int>r
                found += 1
                start[BUCKETS - <int>(self.survival[base + i] * (BUCKETS - 1))] += 1
        for i in range(BUCKETS):
            start[i + 1] += start[i]
        for i in range(found):
            item = self.unsorted[i]
            bucket = BUCKETS - 1 - <int>(self.survival[item.node] * (BUCKETS - 1))
            self.order[start[bucket]] = item
            start[bucket] += 1
        return found

    def select(
        self,
        const int[::1] slots not None,
        const int[::1] caps not None,
        int batch_tokens,
        int rows,
        const double[::1] times not None,
        double sunk,
        double extra,
        bint fresh,
    ):
        cdef Py_ssize_t last = times.shape[0] - 1
        cdef int found, i, r, k = 0, best_k = 0, other = batch_tokens - rows
        cdef double gain = 0.0, best_gain = 0.0, rate, best_rate, plain, slope, value, best_value
        check_rows(self, slots, caps.shape[0], "caps")
        if last < 1 or rows < 0 or batch_tokens < rows:
            raise ValueError("times needs two entries, batch_tokens counts the rows' own tokens")
        if rows == 0 or slots.shape[0] == 0:
            return 0, 0.0, 1.0
        slope = times[last] - times[last - 1]
        with nogil:
            found = self.gather(slots, caps, fresh)
            plain = rows / (step_time(times, last, slope, rows) + sunk)
            best_rate = plain
            for i in range(found):
                r = self.order[i].row
                if self.kept[r] >= caps[r]:
                    self.order[i].row = -1
                    continue
                self.kept[r] += 1
                k += 1
                gain += self.survival[self.order[i].node]
                rate = (rows + gain) / (
                    step_time(times, last, slope, rows + k) + sunk + extra
                )
                if rate > best_rate:
                    best_rate = rate
                    best_k = k
                    best_gain = gain
            if other and best_k:
                # Beside prefill the step is not the draft's to fill: a node must earn what a
                # decode-only step would emit in the time that it adds here.
                best_value = 0.0
                gain = 0.0
                best_gain = 0.0
                best_k = 0
                k = 0
                plain = step_time(times, last, slope, batch_tokens)
                for i in range(found):
                    if self.order[i].row < 0:
                        continue
                    k += 1
                    gain += self.survival[self.order[i].node]
                    value = gain - best_rate * (
                        step_time(times, last, slope, batch_tokens + k) - plain + extra
                    )
                    if value > best_value:
                        best_value = value
                        best_k = k
                        best_gain = gain
                rate = 1.0 + best_value / rows
            else:
                rate = best_rate / plain
            memset(self.kept, 0, slots.shape[0] * sizeof(int))
            k = best_k
            for i in range(found):
                if k == 0:
                    break
                if self.order[i].row >= 0:
                    self.keep[self.order[i].node] = 1
                    self.kept[self.order[i].row] += 1
                    k -= 1
        return best_k, best_gain, rate

    def select_all(self, const int[::1] slots not None, const int[::1] caps not None):
        cdef Py_ssize_t r, base
        cdef int count, total = 0
        check_rows(self, slots, caps.shape[0], "caps")
        for r in range(slots.shape[0]):
            base = <Py_ssize_t>slots[r] * self.width
            count = self.states[slots[r]].count if self.states[slots[r]].fresh else 0
            count = max(0, min(count, caps[r]))
            memset(&self.keep[base], 0, self.width)
            memset(&self.keep[base], 1, count)
            self.kept[r] = count
            total += count
        return total

    def write(
        self,
        const int[::1] slots not None,
        int[::1] counts not None,
        int[::1] tokens not None,
        int[::1] parents not None,
    ):
        cdef Py_ssize_t r, base, total = 0
        cdef int i, next_index
        cdef int[MAX_WIDTH + 1] index
        check_rows(self, slots, counts.shape[0], "counts")
        for r in range(slots.shape[0]):
            total += self.kept[r]
        if tokens.shape[0] < total or parents.shape[0] < total:
            raise ValueError(f"tokens and parents: room for {total} nodes is needed")
        total = 0
        with nogil:
            for r in range(slots.shape[0]):
                base = <Py_ssize_t>slots[r] * self.width
                counts[r] = self.kept[r]
                next_index = 0
                index[0] = 0
                if self.kept[r] == 0:
                    continue
                for i in range(self.states[slots[r]].count):
                    if self.keep[base + i]:
                        next_index += 1
                        index[i + 1] = next_index
                        tokens[total] = self.tokens[base + i]
                        parents[total] = index[self.parents[base + i]]
                        total += 1
        return total

    def kept_of(self, Py_ssize_t rows):
        cdef Py_ssize_t r
        if not 0 <= rows <= self.slots:
            raise ValueError(f"rows: {rows}, but there are {self.slots} slots")
        out = np.empty(rows, np.int32)
        cdef int[::1] counts = out
        for r in range(rows):
            counts[r] = self.kept[r]
        return out

    def offered(self, const int[::1] slots not None, int[::1] counts not None):
        cdef Py_ssize_t r
        check_rows(self, slots, counts.shape[0], "counts")
        for r in range(slots.shape[0]):
            counts[r] = self.states[slots[r]].count

    def estimates(self, int slot):
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot: {slot} is not one of {self.slots}")
        cdef int i
        cdef Py_ssize_t base = <Py_ssize_t>slot * self.width
        return [self.survival[base + i] for i in range(self.states[slot].count)]


cdef inline double step_time(
    const double[::1] times, Py_ssize_t last, double slope, int tokens
) noexcept nogil:
    return times[tokens] if tokens <= last else times[last] + slope * (tokens - last)
