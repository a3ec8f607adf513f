# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""`coupled_sample` for CPU tensors' arrays: noise is computed only where it can matter.

Gumbel noise of a 32-bit word w never exceeds -log(1 - u), about 22.2 - log(2^32 - w), which a bit
count bounds: nearly every token is ruled out by one comparison instead of two logarithms.
"""

from libc.math cimport INFINITY, exp, log
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

cdef extern from * nogil:
    """
    #define outrider_high_bit(x) (31 - __builtin_clz((unsigned)(x) | 1u))
    """
    int outrider_high_bit(uint32_t x)

cdef double WORD_SCALE = 2.0 ** -32
cdef double LN2 = 0.6931471805599453
cdef double NOISE_TOP = 22.19  # above 32 ln 2, the largest bound
cdef Py_ssize_t FIRST_RUN = 64


cdef struct Row:
    const float *logits
    Py_ssize_t vocab
    double temperature
    double top
    uint64_t seed
    uint64_t position
    Py_ssize_t best_id
    double best


cdef inline double scaled(Row *row, Py_ssize_t token) noexcept nogil:
    return <double>row.logits[token] / row.temperature


cdef inline void philox_block(
    uint64_t seed, uint64_t position, uint32_t block, uint32_t *words
) noexcept nogil:
    cdef uint32_t c0 = block, c1 = 0
    cdef uint32_t c2 = <uint32_t>position, c3 = <uint32_t>(position >> 32)
    cdef uint32_t k0 = <uint32_t>seed, k1 = <uint32_t>(seed >> 32)
    cdef uint64_t p0, p1
    cdef int _round
    for _round in range(10):
        p0 = <uint64_t>0xD2511F53 * c0
        p1 = <uint64_t>0xCD9E8D57 * c2
        c0 = <uint32_t>(p1 >> 32) ^ c1 ^ k0
        c2 = <uint32_t>(p0 >> 32) ^ c3 ^ k1
        c1 = <uint32_t>p1
        c3 = <uint32_t>p0
        k0 += <uint32_t>0x9E3779B9
        k1 += <uint32_t>0xBB67AE85
    words[0] = c0
    words[1] = c1
    words[2] = c2
    words[3] = c3


cdef inline void offer(Row *row, Py_ssize_t token, double value, uint32_t word) noexcept nogil:
    """Take the token if its noisy logit beats the best so far (the lower id among equals)."""
    cdef double bound = value + NOISE_TOP - LN2 * outrider_high_bit(~word)
    cdef double score
    if bound < row.best:
        return
    score = value - log(-log((<double>word + 0.5) * WORD_SCALE))
    if score > row.best or (score == row.best and token < row.best_id):
        row.best = score
        row.best_id = token


cdef void draw_from_all(Row *row, Py_ssize_t favourite) noexcept nogil:
    """Draw over the whole vocabulary; starting at the best logit rules most others out."""
    cdef uint32_t words[4]
    cdef Py_ssize_t block, token, last
    cdef float floor
    philox_block(row.seed, row.position, <uint32_t>(favourite // 4), words)
    offer(row, favourite, scaled(row, favourite), words[favourite % 4])
    for block in range((row.vocab + 3) // 4):
        last = min(4 * block + 4, row.vocab)
        # Compared in logits, rounded down by a hair, to spare the divisions.
        floor = <float>((row.best - NOISE_TOP) * row.temperature)
        floor -= 1e-4 * (1.0 + (floor if floor > 0 else -floor))
        for token in range(4 * block, last):
            if row.logits[token] > floor:
                break
        else:
            continue
        philox_block(row.seed, row.position, <uint32_t>block, words)
        for token in range(4 * block, last):
            if row.logits[token] > floor:
                offer(row, token, scaled(row, token), words[token % 4])


cdef inline bint precedes(Row *row, int32_t a, int32_t b) noexcept nogil:
    """Whether token a stands before token b in falling order of logits."""
    return row.logits[a] > row.logits[b] or (row.logits[a] == row.logits[b] and a < b)


cdef void partition_first(
    Row *row, int32_t *ids, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t count
) noexcept nogil:
    """Reorder ids[begin:end] so that its first ``count`` ones are the leading tokens."""
    cdef Py_ssize_t low = begin, high = end - 1, i, j, target = begin + count
    cdef int32_t pivot, swap
    while low < high:
        pivot = ids[low + (high - low) // 2]
        i = low
        j = high
        while i <= j:
            while precedes(row, ids[i], pivot):
                i += 1
            while precedes(row, pivot, ids[j]):
                j -= 1
            if i <= j:
                swap = ids[i]
                ids[i] = ids[j]
                ids[j] = swap
                i += 1
                j -= 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            return


cdef void sort_ids(Row *row, int32_t *ids, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """Heap sort of ids[begin:end] into falling order of logits."""
    cdef Py_ssize_t size = end - begin, start = size // 2, root, child
    cdef int32_t *heap = ids + begin
    cdef int32_t moved
    while size > 1:
        if start > 0:
            start -= 1
            moved = heap[start]
        else:
            size -= 1
            moved = heap[size]
            heap[size] = heap[0]
        root = start
        child = 2 * root + 1
        while child < size:
            if child + 1 < size and precedes(row, heap[child], heap[child + 1]):
                child += 1
            if not precedes(row, moved, heap[child]):
                break
            heap[root] = heap[child]
            root = child
            child = 2 * root + 1
        heap[root] = moved


cdef void draw_filtered(
    Row *row, int32_t *ids, Py_ssize_t top_k, double top_p, double min_p
) noexcept nogil:
    """Draw from the prefix that the filters keep; sorts no further than that prefix reaches."""
    cdef Py_ssize_t token, count = row.vocab, done = 0, run = FIRST_RUN, end, i
    cdef double total = 0.0, before = 0.0, weight
    cdef uint32_t words[4]
    for token in range(row.vocab):
        ids[token] = <int32_t>token
    if 0 < top_k < count:
        partition_first(row, ids, 0, count, top_k)
        count = top_k
    if top_p >= 1.0:  # the order within the kept ones does not matter
        for i in range(count):
            if exp(scaled(row, ids[i]) - row.top) >= min_p:
                philox_block(row.seed, row.position, <uint32_t>(ids[i] // 4), words)
                offer(row, ids[i], scaled(row, ids[i]), words[ids[i] % 4])
        return
    for i in range(count):
        total += exp(scaled(row, ids[i]) - row.top)
    while done < count:
        end = min(done + run, count)
        if end < count:
            partition_first(row, ids, done, count, end - done)
        sort_ids(row, ids, done, end)
        for i in range(done, end):
            weight = exp(scaled(row, ids[i]) - row.top)
            if weight < min_p or before >= top_p * total:
                return
            before += weight
            philox_block(row.seed, row.position, <uint32_t>(ids[i] // 4), words)
            offer(row, ids[i], scaled(row, ids[i]), words[ids[i] % 4])
        done = end
        run *= 4


cdef int need(str name, Py_ssize_t length, Py_ssize_t needed) except -1:
    if length < needed:
        raise ValueError(f"{name} has {length} elements but at least {needed} are needed")
    return 0


def coupled_sample(
    const float[:, ::1] logits not None,
    const float[::1] temperatures not None,
    const int32_t[::1] top_ks not None,
    const float[::1] top_ps not None,
    const float[::1] min_ps not None,
    const int64_t[::1] seeds not None,
    const int64_t[::1] positions not None,
    int64_t[::1] tokens_out not None,
):
    """Write a token a row into tokens_out int64 [>= M], -1 where the row is unusable.

    The arguments are those of the torch reference of this name: logits float32 [M, V],
    temperatures, top_ps, min_ps float32 [M], top_ks int32 [M], seeds, positions int64 [M].
    Raises ValueError naming the array that is too short, MemoryError.
    """
    cdef Py_ssize_t index, token, favourite, rows = logits.shape[0], vocab = logits.shape[1]
    cdef Row row
    cdef int32_t *ids
    cdef bint bad
    need("temperatures", temperatures.shape[0], rows)
    need("top_ks", top_ks.shape[0], rows)
    need("top_ps", top_ps.shape[0], rows)
    need("min_ps", min_ps.shape[0], rows)
    need("seeds", seeds.shape[0], rows)
    need("positions", positions.shape[0], rows)
    need("tokens_out", tokens_out.shape[0], rows)
    if vocab < 1:
        raise ValueError("logits have no columns, a vocabulary has at least one token")
    ids = <int32_t *>malloc(vocab * sizeof(int32_t))
    if ids is NULL:
        raise MemoryError()
    with nogil:
        for index in range(rows):
            row.logits = &logits[index, 0]
            row.vocab = vocab
            row.temperature = temperatures[index]
            row.seed = <uint64_t>seeds[index]
            row.position = <uint64_t>positions[index]
            row.best = -INFINITY
            favourite = 0
            bad = False
            for token in range(vocab):
                bad |= not row.logits[token] < INFINITY  # so is a NaN
                if row.logits[token] > row.logits[favourite]:
                    favourite = token
            if bad or row.logits[favourite] == -INFINITY:
                tokens_out[index] = -1
                continue
            row.best_id = favourite
            row.top = scaled(&row, favourite)
            if 0 < top_ks[index] < vocab or top_ps[index] < 1.0 or min_ps[index] > 0.0:
                draw_filtered(&row, ids, top_ks[index], top_ps[index], min_ps[index])
            else:
                draw_from_all(&row, favourite)
            tokens_out[index] = row.best_id
    free(ids)
