# mypy: disable-error-code="no-untyped-call"
# ruff: noqa: SIM102 (branches at compile time stay apart from those at run time)
"""Where top-k and top-p cut a row of logits, found on the GPU by radix search, without a sort.

A float32 maps to a uint32 key of the same order. Three passes find the key of the last kept token
digit by digit (11, 11 and 10 bits): each adds the tokens that share the digits known so far into
a histogram, counts for top-k and probability sums for top-p; the next launch reads off the next
digit. A row with both filters needs two more passes, since the mass that top-p takes a share of
is known only when top-k's cut is. Several programs share a row; rows that need no pass leave it.

Probabilities relative to the row's best token are summed as integers in units of 2^-40: integer
sums do not depend on the order of the atomics, so the cut is the same in any batch and any run.
Rounding moves it by less than V * 2^-41 of the mass (7e-8 for 152k tokens).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(2048)  # tokens a program handles at a time
GROUP = tl.constexpr(512)  # tokens that share one recorded maximum
BINS = tl.constexpr(2048)
PASSES = tl.constexpr(5)
_COUNTED_PASSES = tl.constexpr(3)  # top-k is through after these
_UNIT = tl.constexpr(2.0**40)
_FIELDS = tl.constexpr(4)  # of a pass's state: prefix, above, mass above, goal
_FLOOR_BITS = tl.constexpr(14)
_PROGRAMS = 2048


@triton.jit
def sort_key(x: tl.tensor) -> tl.tensor:
    """Uint32 keys in the order of the float32 values; both zeros have one key, none has key 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def row_filters(
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    active: tl.tensor,
    row: tl.tensor,
    vocab: tl.tensor,
    HAS_ACTIVE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Whether the row is sampled, cut by top-k, cut by top-p."""
    sampled = tl.load(temperatures + row) > 0
    if HAS_ACTIVE:
        sampled = sampled & (tl.load(active + row) != 0)
    top_k = tl.load(top_ks + row)
    return (
        sampled,
        sampled & (top_k > 0) & (top_k < vocab),
        sampled & (tl.load(top_ps + row) < 1.0),
    )


@triton.jit
def load_maxima(maxima: tl.tensor, row: tl.tensor, groups: tl.tensor, G: tl.constexpr) -> tl.tensor:
    """The row's group maxima; +inf stands for a group with a NaN or +inf."""
    at = tl.arange(0, G)
    return tl.load(maxima + row * groups + at, mask=at < groups, other=float("-inf"))


@triton.jit
def _weight(x: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((x - top) / temperature) in units of 2^-40, int64; computed in float64."""
    inverse = 1.0 / temperature.to(tl.float64)
    fall = (x.to(tl.float64) - top.to(tl.float64)) * inverse
    return (tl.exp(fall) * _UNIT + 0.5).to(tl.int64)


@triton.jit
def _weight_of_key(key: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    ordered = (key.to(tl.uint32) ^ 0x80000000).to(tl.int32, bitcast=True)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return _weight(bits.to(tl.float32, bitcast=True), top, temperature)


@triton.jit
def _narrow(
    values: tl.tensor, above: tl.tensor, goal: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The highest bin at which the running sum from above reaches ``goal``.

    Returns the bin, the sum before it, and how many bins lie above it.
    """
    down = tl.arange(0, BINS)  # x ^ (BINS - 1) counts from the other end
    value = tl.load(values + (down ^ (BINS - 1))).to(tl.int64)
    passed = above + tl.cumsum(value, 0) < goal
    before = tl.minimum(tl.sum(passed.to(tl.int32), 0), BINS - 1)
    return before ^ (BINS - 1), above + tl.sum(tl.where(passed, value, 0), 0), before


@triton.jit
def _share(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The least integer of at least top_p * total, and 1."""
    share = top_p.to(tl.float64) * total.to(tl.float64)
    floor = share.to(tl.int64)
    return tl.maximum(floor + (floor.to(tl.float64) < share).to(tl.int64), 1)


@triton.jit
def _advance(
    counts: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    states: tl.tensor,
    row: tl.tensor,
    by_count: tl.tensor,
    by_sum: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    PASS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Read pass ``PASS``'s histogram: (prefix, above, mass above, goal) with one more digit.

    ``above`` is what lies strictly above the prefix: tokens while top-k's key is sought, mass
    while top-p's is. After pass 3 a row with both filters starts on top-p's key.
    """
    counts += (row * _COUNTED_PASSES + PASS - 1) * BINS
    own_sums = sums + (row * PASSES + PASS - 1) * BINS
    state = states + (row * PASSES + PASS - 1) * _FIELDS
    prefix = tl.zeros((), tl.int64)
    above = tl.zeros((), tl.int64)
    mass = tl.zeros((), tl.int64)
    goal = top_k.to(tl.int64)
    if PASS == 1:
        if by_sum & (by_count == 0):
            goal = _share(top_p, tl.load(totals + row))
    else:
        prefix = tl.load(state)
        above = tl.load(state + 1)
        mass = tl.load(state + 2)
        goal = tl.load(state + 3)
    shift: tl.constexpr = 21 if PASS == 1 else (10 if PASS % 2 == 0 else 0)
    if PASS <= _COUNTED_PASSES:
        if by_count:
            digit, above, before = _narrow(counts, above, goal)
            if by_sum:
                down = tl.arange(0, BINS)
                value = tl.load(own_sums + (down ^ (BINS - 1)))
                mass += tl.sum(tl.where(down < before, value, 0), 0)
            prefix += digit.to(tl.int64) << shift
        else:
            digit, above, before = _narrow(own_sums, above, goal)
            prefix += digit.to(tl.int64) << shift
    else:
        digit, above, before = _narrow(own_sums, above, goal)
        prefix += digit.to(tl.int64) << shift
    if PASS == _COUNTED_PASSES:
        if by_count & by_sum:
            kept_equals = goal - above
            goal = _share(top_p, mass + kept_equals * _weight_of_key(prefix, top, temperature))
            above = tl.zeros((), tl.int64)
            digit, above, before = _narrow(sums + row * PASSES * BINS, above, goal)
            prefix = digit.to(tl.int64) << 21
    return prefix, above, mass, goal


@triton.jit
def find_cut(
    counts: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    states: tl.tensor,
    row: tl.tensor,
    by_count: tl.tensor,
    by_sum: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """(key, take) after the passes: kept are all above the key and the first ``take`` equal it."""
    if by_count & by_sum:
        prefix, above, _, goal = _advance(
            counts, sums, totals, states, row, by_count, by_sum, top_k, top_p, top, temperature, 5
        )
    else:
        prefix, above, _, goal = _advance(
            counts, sums, totals, states, row, by_count, by_sum, top_k, top_p, top, temperature, 3
        )
    take = goal - above
    if by_sum:
        each = tl.maximum(_weight_of_key(prefix, top, temperature), 1)
        take = (take + each - 1) // each
    return prefix, take


@triton.jit
def _row_maxima(
    logits: tl.tensor,
    stride: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    active: tl.tensor,
    maxima: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    tiles_each: tl.tensor,
    HAS_ACTIVE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Group maxima of filtered rows, and zeros in the histograms that they will use."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sampled, by_count, by_sum = row_filters(
        temperatures, top_ks, top_ps, active, row, vocab, HAS_ACTIVE
    )
    if not (by_count | by_sum | (sampled & (tl.load(min_ps + row) > 0))):
        return
    bins = tl.arange(0, BINS)
    for level in range(chunk, PASSES, tl.num_programs(0)):
        if by_count & (level < _COUNTED_PASSES):
            tl.store(counts + (row * _COUNTED_PASSES + level) * BINS + bins, bins * 0)
        if by_sum & (by_count | (level < _COUNTED_PASSES)):
            tl.store(sums + (row * PASSES + level) * BINS + bins, (bins * 0).to(tl.int64))
    if chunk == 0:
        tl.store(totals + row, tl.zeros((), tl.int64))
    for step in range(tiles_each):
        tile = chunk * tiles_each + step
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x != x, float("inf"), x)
        group = tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        best = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
        tl.store(maxima + row * groups + group, best, mask=group < groups)


@triton.jit
def _count_floor(best: tl.tensor, groups: tl.tensor, top_k: tl.tensor) -> tl.tensor:
    """A key that at least top_k tokens reach, since that many groups' maxima do; else 0."""
    keys = tl.where(best > float("-inf"), sort_key(best), 0)
    floor = tl.zeros((), tl.uint32)
    if top_k <= groups:
        for step in tl.static_range(_FLOOR_BITS):
            trial = floor | (tl.full((), 1, tl.uint32) << (31 - step))
            enough = tl.sum((keys >= trial).to(tl.int32), 0) >= top_k
            floor = tl.where(enough, trial, floor)
    return floor


@triton.jit
def _search_pass(
    logits: tl.tensor,
    stride: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    active: tl.tensor,
    maxima: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    states: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    tiles_each: tl.tensor,
    G: tl.constexpr,
    PASS: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One histogram of the tokens that share the digits found so far."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, by_count, by_sum = row_filters(temperatures, top_ks, top_ps, active, row, vocab, HAS_ACTIVE)
    if PASS > _COUNTED_PASSES:
        if not (by_count & by_sum):
            return
    elif not (by_count | by_sum):
        return
    best = load_maxima(maxima, row, groups, G)
    top = tl.max(best, 0)
    if tl.abs(top) == float("inf"):
        return
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    prefix = tl.zeros((), tl.int64)
    floor = tl.zeros((), tl.uint32)
    if PASS == 1:
        if by_count:
            floor = _count_floor(best, groups, top_k)
    else:
        prefix, above, mass, goal = _advance(
            counts,
            sums,
            totals,
            states,
            row,
            by_count,
            by_sum,
            top_k,
            top_p,
            top,
            temperature,
            PASS - 1,
        )
        if chunk == 0:
            state = states + (row * PASSES + PASS - 1) * _FIELDS
            tl.store(state, prefix)
            tl.store(state + 1, above)
            tl.store(state + 2, mass)
            tl.store(state + 3, goal)
    shift: tl.constexpr = 21 if PASS == 1 else (10 if PASS % 2 == 0 else 0)
    # Tokens this unlikely hold too little together to reach into top_p: no histogram needs them.
    least = ((1.0 - top_p.to(tl.float64)) * (_UNIT / 2) / vocab).to(tl.int64)
    counts += (row * _COUNTED_PASSES + PASS - 1) * BINS
    sums += (row * PASSES + PASS - 1) * BINS
    total = tl.zeros((), tl.int64)
    for step in range(tiles_each):
        tile = chunk * tiles_each + step
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        key = sort_key(x)
        if PASS == 1:
            hit = (ids < vocab) & (key >= floor)
        else:
            known: tl.constexpr = 21 if PASS % 2 == 0 else 10
            hit = (ids < vocab) & (key >> known == prefix.to(tl.uint32) >> known)
        if tl.max(hit.to(tl.int32), 0) > 0:
            digit = ((key >> shift) & (1023 if shift == 0 else 2047)).to(tl.int32)
            if PASS <= _COUNTED_PASSES:
                if by_count:
                    tl.atomic_add(counts + digit, 1, mask=hit, sem="relaxed")
            if by_sum:
                weight = _weight(x, top, temperature)
                weighs = hit & (weight > 0)
                if PASS == 1:
                    if by_count == 0:
                        total += tl.sum(tl.where(hit, weight, 0), 0)
                        weighs = weighs & (weight >= least)
                tl.atomic_add(sums + digit, weight, mask=weighs, sem="relaxed")
    if PASS == 1:
        if by_sum & (by_count == 0):
            tl.atomic_add(totals + row, total, sem="relaxed")


class Search(NamedTuple):
    """What the passes leave on the device; every array's first dimension is the row.

    ``maxima`` float32[M, groups], ``counts`` int32[M, 3, BINS], ``sums`` int64[M, 5, BINS],
    ``totals`` int64[M], ``states`` int64[M, 5, 4].
    """

    maxima: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor
    totals: torch.Tensor
    states: torch.Tensor


def split_row(rows: int, vocab: int) -> tuple[int, int]:
    """(programs a row, tiles a program): enough programs to fill a GPU, none without tokens."""
    tiles = triton.cdiv(vocab, BLOCK.value)
    each = triton.cdiv(tiles, max(1, min(tiles, _PROGRAMS // rows)))
    return triton.cdiv(tiles, each), each


def search_cuts(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    active: torch.Tensor | None,
    pdl: bool,
) -> Search:
    """Run the passes over float32 or bfloat16 logits [M, V]; ``find_cut`` reads their results.

    The columns are those of ``coupled_sample``. Rows without top-k and top-p cost no pass, and
    those without min-p either have no maxima.
    """
    rows, vocab = logits.shape
    device = logits.device
    groups = triton.cdiv(vocab, GROUP.value)
    search = Search(
        maxima=torch.empty(rows, groups, dtype=torch.float32, device=device),
        counts=torch.empty(
            rows, _COUNTED_PASSES.value, BINS.value, dtype=torch.int32, device=device
        ),
        sums=torch.empty(rows, PASSES.value, BINS.value, dtype=torch.int64, device=device),
        totals=torch.empty(rows, dtype=torch.int64, device=device),
        states=torch.empty(rows, PASSES.value, _FIELDS.value, dtype=torch.int64, device=device),
    )
    splits, tiles_each = split_row(rows, vocab)
    grid = (splits, rows)
    has_active = active is not None
    mask = temperatures if active is None else active
    _row_maxima[grid](
        logits,
        logits.stride(0),
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        mask,
        search.maxima,
        search.counts,
        search.sums,
        search.totals,
        vocab,
        groups,
        tiles_each,
        HAS_ACTIVE=has_active,
        PDL=pdl,
        launch_pdl=pdl,
    )
    for number in range(1, PASSES.value + 1):
        _search_pass[grid](
            logits,
            logits.stride(0),
            temperatures,
            top_ks,
            top_ps,
            mask,
            *search,
            vocab,
            groups,
            tiles_each,
            G=triton.next_power_of_2(groups),
            PASS=number,
            HAS_ACTIVE=has_active,
            PDL=pdl,
            launch_pdl=pdl,
        )
    return search
