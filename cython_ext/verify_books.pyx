# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""How many drafts a step verifies: confidence that comes back late, and the budget it leads to."""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cython cimport final
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from .int32_bytes cimport int32_data

cdef enum:
    FEW = 48            # floats that are sorted by insertion
    DIGITS = 256


@final
cdef class StepCosts:
    cdef const double[::1] tokens
    cdef const double[::1] values
    cdef const double[::1] requests
    cdef const double[::1] seconds_of
    cdef double bias
    cdef bint additive

    def __cinit__(
        self,
        const double[::1] tokens not None,
        const double[::1] values not None,
        const double[::1] requests=None,
        const double[::1] request_seconds=None,
        double bias=0.0,
    ):
        self.additive = requests is not None
        if tokens.shape[0] < 1 or values.shape[0] != tokens.shape[0]:
            raise ValueError(f"values: {values.shape[0]} for {tokens.shape[0]} probes")
        if self.additive != (request_seconds is not None):
            raise ValueError("requests and request_seconds come together")
        if self.additive and (
            requests.shape[0] < 1 or request_seconds.shape[0] != requests.shape[0]
        ):
            raise ValueError(
                f"request_seconds: {request_seconds.shape[0]} for {requests.shape[0]} probes"
            )
        self.tokens = tokens
        self.values = values
        self.requests = requests
        self.seconds_of = request_seconds
        self.bias = bias

    cdef double fixed(self, Py_ssize_t requests) noexcept nogil:
        """Seconds that do not depend on the tokens."""
        cdef Py_ssize_t at = 0
        if not self.additive:
            return 0.0
        return self.bias + between(
            &self.requests[0], &self.seconds_of[0], self.requests.shape[0] - 1, requests, &at
        )

    cdef double value(self, Py_ssize_t tokens, Py_ssize_t *at) noexcept nogil:
        """The tokens' seconds, or steps a second; ``at``: 0, then as it was left: sizes rise."""
        cdef Py_ssize_t last = self.tokens.shape[0] - 1
        if self.additive:
            return between(&self.tokens[0], &self.values[0], last, tokens, at)
        while at[0] < last and self.tokens[at[0] + 1] <= tokens:
            at[0] += 1
        return self.values[at[0]]

    def seconds(self, Py_ssize_t requests, Py_ssize_t batch_tokens):
        cdef Py_ssize_t at = 0
        cdef double value = self.value(batch_tokens, &at)
        return self.fixed(requests) + value if self.additive else 1.0 / value


cdef double between(
    const double *probes, const double *values, Py_ssize_t last, double x, Py_ssize_t *at
) noexcept nogil:
    """Linear between probes, constant beyond them; rounded as numpy.interp does it."""
    cdef Py_ssize_t j = at[0]
    if x <= probes[0]:
        return values[0]
    while j < last and probes[j + 1] <= x:
        j += 1
    at[0] = j
    if j == last or probes[j] == x:
        return values[j]
    return (values[j + 1] - values[j]) / (probes[j + 1] - probes[j]) * (x - probes[j]) + values[j]


cdef struct Size:
    Py_ssize_t at               # the first of the sizes that may hold it
    Py_ssize_t most             # of a step of these rows; 0: it runs in its exact size


@final
cdef class VerifyBooks:
    cdef int slots, gamma, limit, lag
    cdef bytes graphs           # whose data `sizes` are
    cdef const int32_t *sizes   # [size_count], rising
    cdef Py_ssize_t size_count
    cdef float eps
    cdef int64_t steps              # planned
    cdef int64_t taken              # whose confidence is in
    cdef int64_t *generations       # [slots], requests that have entered
    # Rings of the last `lag` steps: planned ones, whose confidence is not in yet, ...
    cdef int *planned_rows          # [lag]
    cdef int32_t *planned_slots     # [lag, slots]
    cdef int64_t *planned_owners    # [lag, slots], generations of these rows
    # ... and those whose confidence is in.
    cdef int64_t *owners            # [lag, slots], generation that it is of; 0: none
    cdef float *survivals           # [lag, slots, gamma]
    cdef uint32_t *ranked           # [slots * gamma], bits of candidates' survivals
    cdef uint32_t *spare

    def __cinit__(
        self, int slots, int gamma, int lag, int limit, double eps, bytes sizes not None=b""
    ):
        cdef Py_ssize_t i
        if lag < 1:
            raise ValueError(f"lag: must be 1 or more, got {lag}")
        if slots < 1 or gamma < 1 or not 0 <= limit <= gamma:
            raise ValueError(f"slots {slots} and gamma {gamma} must be 1 or more, limit 0 to gamma")
        if not eps >= 0.0:
            raise ValueError(f"eps: must be 0 or more, got {eps}")
        self.graphs = sizes
        self.sizes = int32_data(sizes)
        self.size_count = PyBytes_GET_SIZE(sizes) // 4
        for i in range(self.size_count):
            if self.sizes[i] <= (self.sizes[i - 1] if i else 0):
                raise ValueError(f"sizes: must rise from 1, got {self.sizes[i]} at place {i}")
        self.slots = slots
        self.gamma = gamma
        self.lag = lag
        self.limit = limit
        self.eps = <float>eps
        cdef Py_ssize_t ring = <Py_ssize_t>lag * slots, drafts = <Py_ssize_t>slots * gamma
        self.generations = <int64_t*>calloc(slots, sizeof(int64_t))
        self.planned_rows = <int*>calloc(lag, sizeof(int))
        self.planned_slots = <int32_t*>calloc(ring, sizeof(int32_t))
        self.planned_owners = <int64_t*>calloc(ring, sizeof(int64_t))
        self.owners = <int64_t*>calloc(ring, sizeof(int64_t))
        self.survivals = <float*>calloc(ring * gamma, sizeof(float))
        self.ranked = <uint32_t*>calloc(drafts, sizeof(uint32_t))
        self.spare = <uint32_t*>calloc(drafts, sizeof(uint32_t))
        if (
            self.generations == NULL or self.planned_rows == NULL or self.planned_slots == NULL
            or self.planned_owners == NULL or self.owners == NULL or self.survivals == NULL
            or self.ranked == NULL or self.spare == NULL
        ):
            raise MemoryError("no memory for the books of verify lengths")

    def __dealloc__(self):
        free(self.generations)
        free(self.planned_rows)
        free(self.planned_slots)
        free(self.planned_owners)
        free(self.owners)
        free(self.survivals)
        free(self.ranked)
        free(self.spare)

    cdef int check_slot(self, int slot) except -1:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot: {slot} is not one of {self.slots}")
        return 0

    def start(self, int slot):
        self.check_slot(slot)
        self.generations[slot] += 1

    cdef const float *known(self, Py_ssize_t layer, int slot) noexcept nogil:
        """What is known of a slot's request from a step of the ring, or NULL."""
        cdef Py_ssize_t at = layer * self.slots + slot
        cdef int64_t now = self.generations[slot]
        return &self.survivals[at * self.gamma] if now and self.owners[at] == now else NULL

    def survivals_of(self, int slot):
        cdef int64_t source = self.steps - self.lag
        cdef const float *row
        self.check_slot(slot)
        if not 0 <= source < self.taken:
            return []
        row = self.known(source % self.lag, slot)
        return [] if row == NULL else [row[k] for k in range(self.gamma)]

    def plan(
        self,
        bytes slots not None,
        bytes q_caps not None,
        Py_ssize_t batch_tokens,
        StepCosts costs=None,
        Py_ssize_t forced=-1,
    ):
        cdef Py_ssize_t rows = PyBytes_GET_SIZE(slots) // 4, room = 0, found, r, at, drafts
        cdef const int32_t *slot_of = int32_data(slots)
        cdef const int32_t *caps = int32_data(q_caps)
        cdef int64_t source = self.steps - self.lag
        cdef double emitted, seconds, fixed
        cdef Size size
        if rows > self.slots or PyBytes_GET_SIZE(q_caps) != 4 * rows:
            raise ValueError(
                f"q_caps: {PyBytes_GET_SIZE(q_caps)} bytes for {rows} rows of {self.slots} slots"
            )
        for r in range(rows):
            self.check_slot(slot_of[r])
            room += max(caps[r] - 1, 0)
        if not room:
            return None
        if source >= self.taken:
            raise RuntimeError(
                f"verify step {self.steps} goes by step {source}, but {self.taken} are in"
            )
        at = self.steps % self.lag
        self.planned_rows[at] = <int>rows
        at *= self.slots
        memcpy(&self.planned_slots[at], slot_of, rows * sizeof(int32_t))
        for r in range(rows):
            self.planned_owners[at + r] = self.generations[slot_of[r]]
        self.steps += 1
        if source < 0 or costs is None:
            return None
        found = self.gather(source % self.lag, slot_of, caps, rows)
        sort_bits(self.ranked, self.spare, found)
        fixed = costs.fixed(rows)
        if forced < 0:
            drafts = self.best(costs, fixed, found, rows, batch_tokens)
        else:
            drafts = min(forced, room)
        emitted = 0.0
        for r in range(min(drafts, found)):
            emitted += (<float*>self.ranked)[found - 1 - r]
        at = 0
        size = self.sized(rows, batch_tokens)
        seconds = costs.value(self.tokens(&size, batch_tokens + drafts), &at)
        seconds = fixed + seconds if costs.additive else 1.0 / seconds
        return drafts, found, seconds, (emitted + rows) / seconds

    cdef Py_ssize_t gather(
        self, Py_ssize_t layer, const int32_t *slots, const int32_t *caps, Py_ssize_t rows
    ) noexcept nogil:
        """Write the survivals of all drafts that may be verified."""
        cdef Py_ssize_t r, found = 0
        cdef int k
        cdef float value = 1.0
        cdef const float *row
        cdef float *out = <float*>self.ranked
        for r in range(rows):
            row = self.known(layer, slots[r])
            for k in range(min(caps[r] - 1, self.limit)):
                value = 1.0 if row == NULL else row[k]
                if value >= self.eps:
                    out[found] = value + <float>0.0  # -0 has the bits of a large one
                    found += 1
        return found

    cdef Py_ssize_t best(
        self,
        StepCosts costs,
        double fixed,
        Py_ssize_t found,
        Py_ssize_t rows,
        Py_ssize_t batch_tokens,
    ) noexcept nogil:
        """The first budget of the best rate, over the sorted candidates."""
        cdef const float *chances = <const float*>self.ranked
        cdef Py_ssize_t drafts, best = 0, at = 0
        cdef double total = 0.0, rate, value, best_rate = -1.0
        cdef Size size = self.sized(rows, batch_tokens)
        for drafts in range(found + 1):
            if drafts:
                total += chances[found - drafts]
            value = costs.value(self.tokens(&size, batch_tokens + drafts), &at)
            if costs.additive:
                rate = (total + rows) / (fixed + value)
            else:
                rate = (total + rows) * value
            if rate > best_rate:
                best_rate = rate
                best = drafts
        return best

    cdef Size sized(self, Py_ssize_t rows, Py_ssize_t batch_tokens) noexcept nogil:
        """The sizes that a step of verify rows alone may run in."""
        cdef Py_ssize_t width = self.gamma + 1, last = self.size_count - 1
        cdef Size found
        found.at = found.most = 0
        if batch_tokens != rows or last < 0 or rows * width > self.sizes[last]:
            return found
        while self.sizes[found.at] < rows:
            found.at += 1
        found.most = min(self.sizes[found.at] * width, self.sizes[last])
        return found

    cdef Py_ssize_t tokens(self, Size *size, Py_ssize_t tokens) noexcept nogil:
        """Tokens that such a step has in fact; from call to call they rise."""
        if tokens > size.most:
            return tokens
        while self.sizes[size.at] < tokens:
            size.at += 1
        return min(self.sizes[size.at], size.most)

    def take(self, bytes q_caps not None, Py_ssize_t rows, bytes confidence not None):
        cdef const int32_t *caps = int32_data(q_caps)
        cdef const float *given = <const float*>PyBytes_AS_STRING(confidence)
        cdef Py_ssize_t r, drafting = 0, layer, at
        cdef float running, value
        cdef float *row
        cdef int k
        if not 0 <= 4 * rows <= PyBytes_GET_SIZE(q_caps):
            raise ValueError(f"q_caps: {PyBytes_GET_SIZE(q_caps)} bytes for {rows} rows")
        for r in range(rows):
            drafting += caps[r] > 1
        if PyBytes_GET_SIZE(confidence) != 4 * drafting * self.gamma:
            raise ValueError(
                f"{PyBytes_GET_SIZE(confidence)} bytes of confidence came for {drafting} rows of "
                f"{self.gamma} drafts"
            )
        if not drafting:
            return
        if self.taken == self.steps:
            raise RuntimeError("confidence of a step that was not planned")
        layer = self.taken % self.lag
        if rows != self.planned_rows[layer]:
            raise ValueError(
                f"confidence of {rows} rows came for a step of {self.planned_rows[layer]}"
            )
        # A row that this step lacks must not pass for one of it.
        memset(&self.owners[layer * self.slots], 0, self.slots * sizeof(int64_t))
        for r in range(rows):
            at = layer * self.slots + self.planned_slots[layer * self.slots + r]
            # One that did not draft tells nothing: it counts as sure, like one that was not there.
            if caps[r] <= 1:
                continue
            self.owners[at] = self.planned_owners[layer * self.slots + r]
            row = &self.survivals[at * self.gamma]
            running = 1.0
            for k in range(self.gamma):
                value = given[k]
                running = running * (value if value == value else <float>0.0)
                row[k] = running
            given += self.gamma
        self.taken += 1


cdef void sort_bits(uint32_t *values, uint32_t *spare, Py_ssize_t count) noexcept nogil:
    """Sort floats that are not below 0 by their bits, which rise with them."""
    cdef Py_ssize_t[DIGITS] start
    cdef Py_ssize_t i, j, before, size
    cdef uint32_t value
    cdef int shift
    cdef uint32_t *source = values
    cdef uint32_t *target = spare
    if count <= FEW:
        for i in range(1, count):
            value = values[i]
            j = i
            while j > 0 and values[j - 1] > value:
                values[j] = values[j - 1]
                j -= 1
            values[j] = value
        return
    for shift in range(0, 32, 8):
        memset(start, 0, sizeof(start))
        for i in range(count):
            start[(source[i] >> shift) & (DIGITS - 1)] += 1
        before = 0
        for i in range(DIGITS):
            size = start[i]
            start[i] = before
            before += size
        for i in range(count):
            value = source[i]
            j = (value >> shift) & (DIGITS - 1)
            target[start[j]] = value
            start[j] += 1
        source, target = target, source
