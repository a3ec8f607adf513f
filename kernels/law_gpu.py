# mypy: disable-error-code="no-untyped-call"

"""The target's law of a row on the GPU, after its filters, over several programs a row.

``measure_laws`` finds what the kept tokens' weights sum to, and those of a draft's law; ``row_law``
and ``tile_law`` then give every program the probabilities of its tokens. Probabilities are float32,
so that a row near a tie may depend on the number of rows beside it; the law does not.
"""

import torch
import triton
import triton.language as tl

from .gumbel_gpu import load_tile
from .logit_cut_gpu import Search, find_cut, load_maxima, row_filters, sort_key, split_row
from .rejection_sample import LEAST_HEAT

_LEAST_HEAT = tl.constexpr(LEAST_HEAT)
_PARTS = tl.constexpr(4)  # of a chunk: p's peak and sum, q's peak and sum


@triton.jit
def is_judged(
    tokens: tl.tensor, drafts: tl.tensor, temperatures: tl.tensor, active: tl.tensor,
    row: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Whether the node holds a draft against a usable law."""
    sampled = (tl.load(temperatures + row) > 0) & (tl.load(active + row) != 0)
    return sampled & (tl.load(drafts + row) >= 0) & (tl.load(tokens + row) >= 0)


@triton.jit
def weight(x: tl.tensor, base: tl.tensor, heat: tl.tensor) -> tl.tensor:
    """exp((x - base) / heat), 0 for -inf; base is finite and not below x."""
    return tl.exp(tl.maximum(x - base, -1e30) / heat)


@triton.jit
def likely(x: tl.tensor, top: tl.tensor, heat: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Whether min-p keeps logits x of a row whose largest is ``top`` (read only with min-p)."""
    below = tl.where(min_p > 0, tl.minimum(x - top, 0.0), 0.0)
    return weight(below, 0.0, heat) >= min_p


@triton.jit
def add_kept(
    peak: tl.tensor, total: tl.tensor, x: tl.tensor, kept: tl.tensor, heat: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The largest x so far and the sum of exp((x - it) / heat), now with a tile's kept ones.

    +inf spoils the sum, which means nothing then.
    """
    higher = tl.maximum(peak, tl.max(tl.where(kept, x, float("-inf")), 0))
    usable = tl.abs(higher) < float("inf")
    base = tl.where(usable, higher, 0.0)
    before = total * weight(tl.where(usable & (total > 0), peak, base), base, heat)
    kept = kept & (tl.where(kept, higher, float("inf")) < float("inf"))
    return higher, before + tl.sum(
        tl.where(kept, weight(tl.where(kept, x, base), base, heat), 0), 0
    )


@triton.jit
def measure_laws(
    logits: tl.tensor, stride: tl.tensor, temperatures: tl.tensor, top_ks: tl.tensor,
    top_ps: tl.tensor, min_ps: tl.tensor, active: tl.tensor, maxima: tl.tensor, counts: tl.tensor,
    sums: tl.tensor, totals: tl.tensor, states: tl.tensor, tokens: tl.tensor, drafts: tl.tensor,
    draft_logits: tl.tensor, draft_stride: tl.tensor, draft_rows: tl.tensor, cuts: tl.tensor,
    parts: tl.tensor, tie_counts: tl.tensor, vocab: tl.tensor, draft_vocab: tl.tensor,
    groups: tl.tensor, tiles_each: tl.tensor, G: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Each program's share of both laws' sums, and its tokens equal to the last kept one.

    ``draft_logits`` None: of p alone.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if not is_judged(tokens, drafts, temperatures, active, row):
        return
    _, by_count, by_sum = row_filters(temperatures, top_ks, top_ps, active, row, vocab, True)
    heat, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top = tl.zeros((), tl.float32)
    cut = tl.zeros((), tl.int64)
    take = tl.zeros((), tl.int64)
    if by_count | by_sum | (min_p > 0):
        top = tl.max(load_maxima(maxima, row, groups, G), 0)
    if by_count | by_sum:
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        cut, take = find_cut(
            counts, sums, totals, states, row, by_count, by_sum, top_k, top_p, top, heat
        )
    if chunk == 0:
        tl.store(cuts + row * 2, cut)
        tl.store(cuts + row * 2 + 1, take)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    draft_peak = tl.full((), float("-inf"), tl.float32)
    draft_total = tl.zeros((), tl.float32)
    ties = tl.zeros((), tl.int32)
    draft_heat = tl.maximum(heat, _LEAST_HEAT)
    draft_row = tl.zeros((), tl.int64)
    if draft_logits is not None:
        draft_row = tl.load(draft_rows + row).to(tl.int64)
    for step in range(tiles_each):
        tile = chunk * tiles_each + step
        ids, x = load_tile(logits + row * stride, tile, vocab)
        key = sort_key(x)
        kept = (x > float("-inf")) & (key > cut.to(tl.uint32))
        kept = kept & likely(x, top, heat, min_p)
        peak, total = add_kept(peak, total, x, kept, heat)
        ties += tl.sum(((ids < vocab) & (key == cut.to(tl.uint32))).to(tl.int32), 0)
        if draft_logits is not None:
            ids, y = load_tile(draft_logits + draft_row * draft_stride, tile, draft_vocab)
            y = tl.where(y != y, float("inf"), y)
            draft_peak, draft_total = add_kept(
                draft_peak, draft_total, y, y > float("-inf"), draft_heat
            )
    at = row * tl.num_programs(0) + chunk
    tl.store(parts + at * _PARTS, peak)
    tl.store(parts + at * _PARTS + 1, total)
    tl.store(parts + at * _PARTS + 2, draft_peak)
    tl.store(parts + at * _PARTS + 3, draft_total)
    tl.store(tie_counts + at, ties)


@triton.jit
def gather_sum(
    parts: tl.tensor, at: tl.tensor, valid: tl.tensor, heat: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """A row's peak, and its sum relative to it."""
    peaks = tl.load(parts + at * _PARTS, mask=valid, other=float("-inf"))
    totals = tl.load(parts + at * _PARTS + 1, mask=valid, other=0.0)
    peak = tl.max(peaks, 0)
    base = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    there = (totals > 0) & (peaks < float("inf"))
    return peak, tl.sum(totals * weight(tl.where(there, peaks, base), base, heat), 0)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """The float32 whose ``sort_key`` it is."""
    ordered = (key.to(tl.uint32) ^ 0x80000000).to(tl.int32, bitcast=True)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def lead(
    best: tl.tensor, best_id: tl.tensor, weight: tl.tensor, noise: tl.tensor, ids: tl.tensor,
    vocab: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The best (log weight + noise, id) so far, now with a tile's; the lower id among equals."""
    there = weight > 0
    score = tl.where(there, tl.log(tl.where(there, weight, 1.0)) + noise, float("-inf"))
    high = tl.max(score, 0)
    if high > best:
        best_id = tl.min(tl.where(score == high, ids, vocab), 0)
        best = high
    return best, best_id


@triton.jit
def row_law(
    parts: tl.tensor, tie_counts: tl.tensor, cuts: tl.tensor, maxima: tl.tensor, row: tl.tensor,
    chunk: tl.tensor, splits: tl.tensor, groups: tl.tensor, heat: tl.tensor, min_p: tl.tensor,
    S: tl.constexpr, G: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(top, cut, left, base, total) of a row's law, as ``tile_law`` takes them: ``left`` of the
    tokens equal to the last kept one are kept from this chunk on."""
    cut, take = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
    part = tl.arange(0, S)
    valid = part < splits
    at = row * splits + part
    peak, total = gather_sum(parts, at, valid, heat)
    ties = tl.load(tie_counts + at, mask=valid & (part < chunk), other=0)
    left = take - tl.sum(ties, 0)
    top = tl.zeros((), tl.float32)
    tied = tl.where(take > 0, value_of(cut), 0.0)
    if min_p > 0:
        top = tl.max(load_maxima(maxima, row, groups, G), 0)
    tie_kept = (take > 0) & likely(tied, top, heat, min_p)
    tied = tl.where(tie_kept, tied, float("-inf"))
    left = tl.where(tie_kept, left, 0)
    base = tl.maximum(peak, tied)
    total *= weight(tl.where(total > 0, peak, base), base, heat)
    total += take.to(tl.float32) * weight(tied, base, heat)
    return top, cut, left, base, total


@triton.jit
def tile_law(
    ids: tl.tensor, x: tl.tensor, top: tl.tensor, cut: tl.tensor, left: tl.tensor, base: tl.tensor,
    total: tl.tensor, heat: tl.tensor, min_p: tl.tensor, vocab: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """p of a tile's tokens, and ``left`` behind it."""
    key = sort_key(x)
    equal = (ids < vocab) & (key == cut.to(tl.uint32))
    kept = (x > float("-inf")) & (key > cut.to(tl.uint32))
    kept = kept & likely(x, top, heat, min_p)
    kept = kept | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    left -= tl.sum(equal.to(tl.int32), 0)
    return tl.where(kept, weight(tl.where(kept, x, base), base, heat) / total, 0.0), left


@triton.jit
def draft_row_law(
    parts: tl.tensor, row: tl.tensor, splits: tl.tensor, draft_vocab: tl.tensor,
    draft_heat: tl.tensor, S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(columns, base, total) of what a row's draft was drawn from; no columns where that is no
    law."""
    part = tl.arange(0, S)
    peak, total = gather_sum(parts + 2, row * splits + part, part < splits, draft_heat)
    lawful = (tl.abs(peak) < float("inf")) & (total > 0)
    return (
        tl.where(lawful, draft_vocab, 0),
        tl.where(lawful, peak, 0.0),
        tl.where(lawful, total, 1.0),
    )


@triton.jit
def draft_tile_law(
    row_logits: tl.tensor, draft_ids: tl.tensor, ids: tl.tensor, columns: tl.tensor,
    base: tl.tensor, total: tl.tensor, draft_heat: tl.tensor, vocab: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """q of a tile's tokens."""
    column = ids
    known = ids < vocab
    if draft_ids is not None:
        column = tl.load(draft_ids + ids, mask=known, other=-1)
        known = column >= 0
    known = known & (column < columns)
    y = tl.load(row_logits + column, mask=known, other=float("-inf")).to(tl.float32)
    known = known & (y > float("-inf"))
    return tl.where(known, weight(tl.where(known, y, base), base, draft_heat) / total, 0.0)


@triton.jit
def pick_drawn(
    scores: tl.tensor, ids_in: tl.tensor, row: tl.tensor, splits: tl.tensor, vocab: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The best of a row's programs' winners: of what is left of p, of p where that is nothing."""
    part = tl.arange(0, S)
    valid = part < splits
    at = (row * splits + part) * 2
    score = tl.load(scores + at, mask=valid, other=float("-inf"))
    if tl.max(score, 0) == float("-inf"):  # rounding left nothing
        at += 1
        score = tl.load(scores + at, mask=valid, other=float("-inf"))
    token = tl.load(ids_in + at, mask=valid, other=0)
    return tl.min(tl.where(valid & (score == tl.max(score, 0)), token, vocab), 0).to(tl.int64)


class LawBuffers:
    """What the programs of rows of ``logits`` tell each other, see the kernels."""

    def __init__(self, logits: torch.Tensor, found: Search) -> None:
        rows, vocab = logits.shape
        device, self.groups = logits.device, found.maxima.shape[1]
        self.splits, self.tiles_each = split_row(rows, vocab)
        shape = rows, self.splits
        self.parts = torch.empty(*shape, _PARTS.value, dtype=torch.float32, device=device)
        self.scores = torch.empty(*shape, 2, dtype=torch.float32, device=device)
        self.ids = torch.empty(*shape, 2, dtype=torch.int32, device=device)
        self.tie_counts = torch.empty(shape, dtype=torch.int32, device=device)
        self.cuts = torch.empty(rows, 2, dtype=torch.int64, device=device)
