# mypy: disable-error-code="no-untyped-call"

"""`rejection_sample` on the GPU: two passes over the laws of nodes with drafts, and a pick.

The first measures what both laws sum to, the second draws from what p has beyond q; several
programs share a row. Probabilities are float32, so which token a row near a tie gets may depend on
the number of rows beside it; the law does not. Nodes without drafts are ``coupled_sample``'s.
"""

import torch
import triton
import triton.language as tl

from .coupled_sample_gpu import coupled_sample
from .gumbel_gpu import load_tile, philox_words, screening_noise
from .logit_cut_gpu import (
    BLOCK,
    find_cut,
    load_maxima,
    row_filters,
    search_cuts,
    sort_key,
    split_row,
)
from .noise_streams import ACCEPT, RESIDUAL
from .rejection_sample import LEAST_HEAT

_ACCEPT = tl.constexpr(ACCEPT)
_RESIDUAL = tl.constexpr(RESIDUAL)
_LEAST_HEAT = tl.constexpr(LEAST_HEAT)
_WORD_SCALE = tl.constexpr(2.0**-32)
_PARTS = tl.constexpr(4)  # of a chunk: p's peak and sum, q's peak and sum


@triton.jit
def _is_drafted(
    tokens: tl.tensor, drafts: tl.tensor, temperatures: tl.tensor, active: tl.tensor,
    row: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Whether the node holds a draft against a usable law."""
    sampled = (tl.load(temperatures + row) > 0) & (tl.load(active + row) != 0)
    return sampled & (tl.load(drafts + row) >= 0) & (tl.load(tokens + row) >= 0)


@triton.jit
def _weight(x: tl.tensor, base: tl.tensor, heat: tl.tensor) -> tl.tensor:
    """exp((x - base) / heat), 0 for -inf; base is finite and not below x."""
    return tl.exp(tl.maximum(x - base, -1e30) / heat)


@triton.jit
def _likely(x: tl.tensor, top: tl.tensor, heat: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Whether min-p keeps logits x of a row whose largest is ``top`` (read only with min-p)."""
    below = tl.where(min_p > 0, tl.minimum(x - top, 0.0), 0.0)
    return _weight(below, 0.0, heat) >= min_p


@triton.jit
def _add(
    peak: tl.tensor, total: tl.tensor, x: tl.tensor, kept: tl.tensor, heat: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The largest x so far and the sum of exp((x - it) / heat), now with a tile's kept ones.

    +inf spoils the sum, which means nothing then.
    """
    higher = tl.maximum(peak, tl.max(tl.where(kept, x, float("-inf")), 0))
    usable = tl.abs(higher) < float("inf")
    base = tl.where(usable, higher, 0.0)
    before = total * _weight(tl.where(usable & (total > 0), peak, base), base, heat)
    kept = kept & (tl.where(kept, higher, float("inf")) < float("inf"))
    return higher, before + tl.sum(
        tl.where(kept, _weight(tl.where(kept, x, base), base, heat), 0), 0
    )


@triton.jit
def _measure(
    logits: tl.tensor, stride: tl.tensor, temperatures: tl.tensor, top_ks: tl.tensor,
    top_ps: tl.tensor, min_ps: tl.tensor, active: tl.tensor, maxima: tl.tensor, counts: tl.tensor,
    sums: tl.tensor, totals: tl.tensor, states: tl.tensor, tokens: tl.tensor, drafts: tl.tensor,
    draft_logits: tl.tensor, draft_stride: tl.tensor, draft_rows: tl.tensor, cuts: tl.tensor,
    parts: tl.tensor, tie_counts: tl.tensor, vocab: tl.tensor, draft_vocab: tl.tensor,
    groups: tl.tensor, tiles_each: tl.tensor, G: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Each program's share of both laws' sums, and its tokens equal to the last kept one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if not _is_drafted(tokens, drafts, temperatures, active, row):
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
    draft_row = tl.load(draft_rows + row).to(tl.int64)
    for step in range(tiles_each):
        tile = chunk * tiles_each + step
        ids, x = load_tile(logits + row * stride, tile, vocab)
        key = sort_key(x)
        kept = (x > float("-inf")) & (key > cut.to(tl.uint32))
        kept = kept & _likely(x, top, heat, min_p)
        peak, total = _add(peak, total, x, kept, heat)
        ties += tl.sum(((ids < vocab) & (key == cut.to(tl.uint32))).to(tl.int32), 0)
        ids, y = load_tile(draft_logits + draft_row * draft_stride, tile, draft_vocab)
        y = tl.where(y != y, float("inf"), y)
        draft_peak, draft_total = _add(draft_peak, draft_total, y, y > float("-inf"), draft_heat)
    at = row * tl.num_programs(0) + chunk
    tl.store(parts + at * _PARTS, peak)
    tl.store(parts + at * _PARTS + 1, total)
    tl.store(parts + at * _PARTS + 2, draft_peak)
    tl.store(parts + at * _PARTS + 3, draft_total)
    tl.store(tie_counts + at, ties)


@triton.jit
def _gather(
    parts: tl.tensor, at: tl.tensor, valid: tl.tensor, heat: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """A row's peak, and its sum relative to it."""
    peaks = tl.load(parts + at * _PARTS, mask=valid, other=float("-inf"))
    totals = tl.load(parts + at * _PARTS + 1, mask=valid, other=0.0)
    peak = tl.max(peaks, 0)
    base = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    there = (totals > 0) & (peaks < float("inf"))
    return peak, tl.sum(totals * _weight(tl.where(there, peaks, base), base, heat), 0)


@triton.jit
def _value_of(key: tl.tensor) -> tl.tensor:
    """The float32 whose ``sort_key`` it is."""
    ordered = (key.to(tl.uint32) ^ 0x80000000).to(tl.int32, bitcast=True)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _lead(
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
def _draw_left(
    logits: tl.tensor, stride: tl.tensor, temperatures: tl.tensor, min_ps: tl.tensor,
    seeds: tl.tensor, positions: tl.tensor, active: tl.tensor, maxima: tl.tensor,
    tokens: tl.tensor, drafts: tl.tensor, draft_logits: tl.tensor, draft_stride: tl.tensor,
    draft_rows: tl.tensor, draft_ids: tl.tensor, cuts: tl.tensor, parts: tl.tensor,
    tie_counts: tl.tensor, scores: tl.tensor, ids_out: tl.tensor, accepted: tl.tensor,
    vocab: tl.tensor, draft_vocab: tl.tensor, groups: tl.tensor, splits: tl.tensor,
    tiles_each: tl.tensor, S: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Each program's winners, of what is left of p and of p; one says whether the draft stays."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if not _is_drafted(tokens, drafts, temperatures, active, row):
        return
    heat, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    draft_heat = tl.maximum(heat, _LEAST_HEAT)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    draft, draft_row = tl.load(drafts + row), tl.load(draft_rows + row).to(tl.int64)
    cut, take = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
    part = tl.arange(0, S)
    valid = part < splits
    at = row * splits + part
    peak, total = _gather(parts, at, valid, heat)
    draft_peak, draft_total = _gather(parts + 2, at, valid, draft_heat)
    ties = tl.load(tie_counts + at, mask=valid & (part < chunk), other=0)
    left = take - tl.sum(ties, 0)  # of the tokens equal to the last kept one, from here on
    top = tl.zeros((), tl.float32)
    tied = tl.where(take > 0, _value_of(cut), 0.0)
    if min_p > 0:
        top = tl.max(load_maxima(maxima, row, groups, G), 0)
    tie_kept = (take > 0) & _likely(tied, top, heat, min_p)
    tied = tl.where(tie_kept, tied, float("-inf"))
    left = tl.where(tie_kept, left, 0)
    base = tl.maximum(peak, tied)
    total *= _weight(tl.where(total > 0, peak, base), base, heat)
    total += take.to(tl.float32) * _weight(tied, base, heat)
    lawful = (tl.abs(draft_peak) < float("inf")) & (draft_total > 0)
    draft_base = tl.where(lawful, draft_peak, 0.0)
    columns = tl.where(lawful, draft_vocab, 0)
    draft_total = tl.where(lawful, draft_total, 1.0)
    best = tl.full((), float("-inf"), tl.float32)
    best_id = tl.zeros((), tl.int32) + vocab
    whole = best
    whole_id = best_id
    for step in range(tiles_each):
        tile = chunk * tiles_each + step
        ids, x = load_tile(logits + row * stride, tile, vocab)
        key = sort_key(x)
        equal = (ids < vocab) & (key == cut.to(tl.uint32))
        kept = (x > float("-inf")) & (key > cut.to(tl.uint32))
        kept = kept & _likely(x, top, heat, min_p)
        kept = kept | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
        left -= tl.sum(equal.to(tl.int32), 0)
        p = tl.where(kept, _weight(tl.where(kept, x, base), base, heat) / total, 0.0)
        column = ids
        known = ids < vocab
        if draft_ids is not None:
            column = tl.load(draft_ids + ids, mask=known, other=-1)
            known = column >= 0
        known = known & (column < columns)
        y = tl.load(
            draft_logits + draft_row * draft_stride + column, mask=known, other=float("-inf")
        ).to(tl.float32)
        known = known & (y > float("-inf"))
        y = tl.where(known, y, draft_base)
        q = tl.where(known, _weight(y, draft_base, draft_heat) / draft_total, 0.0)
        words = philox_words(seed ^ _RESIDUAL, position, tile * BLOCK, BLOCK)
        noise = screening_noise(words)
        best, best_id = _lead(best, best_id, p - q, noise, ids, vocab)
        whole, whole_id = _lead(whole, whole_id, p, noise, ids, vocab)
        if (draft >= tile * BLOCK) & (draft < tile * BLOCK + BLOCK):
            p_d = tl.sum(tl.where(ids == draft, p, 0.0), 0)
            q_d = tl.sum(tl.where(ids == draft, q, 0.0), 0)
            first = philox_words(seed ^ _ACCEPT, position, tile * 0, 8)
            word = tl.max(tl.where(tl.arange(0, 8) == 0, first, 0), 0)
            u = (word.to(tl.float64) + 0.5) * _WORD_SCALE
            stays = (q_d > 0) & (u * q_d.to(tl.float64) < p_d.to(tl.float64))
            tl.store(accepted + row, stays.to(tl.int32))
    here = row * splits + chunk
    tl.store(scores + here * 2, best)
    tl.store(scores + here * 2 + 1, whole)
    tl.store(ids_out + here * 2, best_id)
    tl.store(ids_out + here * 2 + 1, whole_id)


@triton.jit
def _pick_left(
    temperatures: tl.tensor, active: tl.tensor, tokens: tl.tensor, drafts: tl.tensor,
    scores: tl.tensor, ids_in: tl.tensor, accepted: tl.tensor, vocab: tl.tensor, splits: tl.tensor,
    S: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The row's token: the draft, or the best of its programs' winners."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if not _is_drafted(tokens, drafts, temperatures, active, row):
        return
    part = tl.arange(0, S)
    valid = part < splits
    at = (row * splits + part) * 2
    score = tl.load(scores + at, mask=valid, other=float("-inf"))
    if tl.max(score, 0) == float("-inf"):  # rounding left nothing
        at += 1
        score = tl.load(scores + at, mask=valid, other=float("-inf"))
    token = tl.load(ids_in + at, mask=valid, other=0)
    drawn = tl.min(tl.where(valid & (score == tl.max(score, 0)), token, vocab), 0).to(tl.int64)
    tl.store(tokens + row, tl.where(tl.load(accepted + row) != 0, tl.load(drafts + row), drawn))


def rejection_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_rows: torch.Tensor,
    draft_ids: torch.Tensor | None,
    *,
    active: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """int64[M]: the token of each node, see the reference.

    ``logits`` float32 or bfloat16, rows contiguous, as those of ``draft_logits`` of any float
    dtype. Where ``active`` (bool or uint8 [M]) is 0 the token is the row's argmax. ``pdl``:
    programmatic dependent launch (Hopper and later). Raises ValueError for another layout, and
    where ``coupled_sample`` does.
    """
    (rows, vocab), draft_vocab = logits.shape, draft_logits.shape[1]
    if draft_logits.stride(1) != 1:
        raise ValueError("draft_logits rows are not contiguous")
    if draft_vocab > vocab:
        raise ValueError(f"draft_logits have {draft_vocab} columns for {vocab} tokens")
    active = active.view(torch.uint8)
    found = search_cuts(logits, temperatures, top_ks, top_ps, min_ps, active, pdl) if rows else None
    tokens = coupled_sample(
        logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, active=active, found=found,
        pdl=pdl,
    )  # fmt: skip
    if found is None:
        return tokens
    splits, tiles_each = split_row(rows, vocab)
    device, groups = logits.device, found.maxima.shape[1]
    parts = torch.empty(rows, splits, _PARTS.value, dtype=torch.float32, device=device)
    scores = torch.empty(rows, splits, 2, dtype=torch.float32, device=device)
    ids = torch.empty(rows, splits, 2, dtype=torch.int32, device=device)
    tie_counts = torch.empty(rows, splits, dtype=torch.int32, device=device)
    cuts = torch.empty(rows, 2, dtype=torch.int64, device=device)
    accepted = torch.empty(rows, dtype=torch.int32, device=device)
    static = {"PDL": pdl, "launch_pdl": pdl}
    span = {"G": triton.next_power_of_2(groups), **static}
    lanes = triton.next_power_of_2(splits)
    _measure[(splits, rows)](
        logits, logits.stride(0), temperatures, top_ks, top_ps, min_ps, active, *found, tokens,
        drafts, draft_logits, draft_logits.stride(0), draft_rows, cuts, parts, tie_counts, vocab,
        draft_vocab, groups, tiles_each, **span,
    )  # fmt: skip
    _draw_left[(splits, rows)](
        logits, logits.stride(0), temperatures, min_ps, seeds, positions, active, found.maxima,
        tokens, drafts, draft_logits, draft_logits.stride(0), draft_rows, draft_ids, cuts, parts,
        tie_counts, scores, ids, accepted, vocab, draft_vocab, groups, splits, tiles_each, S=lanes,
        **span,
    )  # fmt: skip
    _pick_left[(rows,)](
        temperatures, active, tokens, drafts, scores, ids, accepted, vocab, splits, S=lanes,
        **static,
    )  # fmt: skip
    return tokens
