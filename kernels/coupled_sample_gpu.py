# mypy: disable-error-code="no-untyped-call"
# ruff: noqa: SIM102 (branches at compile time stay apart from those at run time)
"""`coupled_sample` on the GPU: the filters' cuts without a sort, then the best noisy logit.

Which token wins is decided in float64, as on the CPU: logit / temperature + Gumbel noise of the
token's Philox word, lower ids first among equals (``gumbel_gpu`` screens in float32 which tokens
need it). So CPU and GPU draw the same token unless two float64 scores are within rounding, about
1e-15, or the edge of a filter is: top-p's sums are integers in units of 2^-40 here (see
``logit_cut_gpu``) and float64 there, which moves the edge by less than 1e-7 of the mass.
``benchmarks/bench_sample_gpu.py`` counts the tokens that differ.
"""

import torch
import triton
import triton.language as tl

from .gumbel_gpu import least_fall, load_tile, offer, within
from .logit_cut_gpu import (
    Search,
    find_cut,
    load_maxima,
    row_filters,
    search_cuts,
    sort_key,
    split_row,
)


@triton.jit
def _draw(
    logits: tl.tensor,
    stride: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    active: tl.tensor,
    maxima: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    states: tl.tensor,
    cuts: tl.tensor,
    scores: tl.tensor,
    ids_out: tl.tensor,
    tie_counts: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    tiles_each: tl.tensor,
    G: tl.constexpr,
    FILTERED: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Each program's winner, and its winner among the tokens equal to the last kept one.

    A score of +inf stands for an unusable logit.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sampled, by_count, by_sum = row_filters(
        temperatures, top_ks, top_ps, active, row, vocab, HAS_ACTIVE
    )
    row_logits = logits + row * stride
    best = tl.full((), float("-inf"), tl.float64)
    best_id = tl.zeros((), tl.int32) + vocab
    tie_best = best
    tie_id = best_id
    ties = tl.zeros((), tl.int32)
    bad = tl.zeros((), tl.int32)
    if sampled:
        temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        top = tl.full((), float("inf"), tl.float32)
        cut = tl.zeros((), tl.int64)
        if FILTERED:
            take = tl.zeros((), tl.int64)
            if by_count | by_sum | (min_p > 0):
                top = tl.max(load_maxima(maxima, row, groups, G), 0)
            if (by_count | by_sum) & (tl.abs(top) < float("inf")):
                top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
                cut, take = find_cut(
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
                )
            if chunk == 0:
                tl.store(cuts + row * 2, cut)
                tl.store(cuts + row * 2 + 1, take)
        else:
            min_p = min_p * 0
        least = least_fall(min_p)
        for step in range(tiles_each):
            tile = chunk * tiles_each + step
            ids, x = load_tile(row_logits, tile, vocab)
            bad = tl.maximum(bad, tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0))
            x = tl.where(x < float("inf"), x, float("-inf"))
            key = sort_key(x)
            known_top = tl.where(tl.abs(top) < float("inf"), top, tl.max(x, 0))
            near = within(x, tl.maximum(known_top, -3e38), temperature, least)
            best, best_id = offer(
                row_logits,
                tile,
                x,
                near & (key > cut.to(tl.uint32)),
                best,
                best_id,
                top,
                temperature,
                min_p,
                seed,
                position,
            )
            if FILTERED:
                tied = (ids < vocab) & (key == cut.to(tl.uint32))
                ties += tl.sum(tied.to(tl.int32), 0)
                tie_best, tie_id = offer(
                    row_logits,
                    tile,
                    x,
                    near & tied,
                    tie_best,
                    tie_id,
                    top,
                    temperature,
                    min_p,
                    seed,
                    position,
                )
    else:
        for step in range(tiles_each):
            tile = chunk * tiles_each + step
            ids, x = load_tile(row_logits, tile, vocab)
            finite = tl.abs(x) < float("inf")
            bad = tl.maximum(bad, tl.max(((ids < vocab) & (finite == 0)).to(tl.int32), 0))
            high = tl.max(x, 0)
            if high.to(tl.float64) > best:
                best = high.to(tl.float64)
                best_id = tl.min(tl.where(x == high, ids, vocab), 0)
    at = row * tl.num_programs(0) + chunk
    tl.store(scores + at * 2, tl.where(bad > 0, float("inf"), best))
    tl.store(scores + at * 2 + 1, tie_best)
    tl.store(ids_out + at * 2, best_id)
    tl.store(ids_out + at * 2 + 1, tie_id)
    tl.store(tie_counts + at, ties)


@triton.jit
def _pick(
    logits: tl.tensor,
    stride: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    active: tl.tensor,
    maxima: tl.tensor,
    cuts: tl.tensor,
    scores: tl.tensor,
    ids_in: tl.tensor,
    tie_counts: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    splits: tl.tensor,
    tiles_each: tl.tensor,
    S: tl.constexpr,
    G: tl.constexpr,
    FILTERED: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The row's token from its programs' winners.

    Of the tokens equal to the last kept one only the first ``take`` take part. Programs that hold
    only such ones have their winner ready; the one in which the last of them lies looks again.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, S)
    valid = part < splits
    at = row * splits + part
    score = tl.load(scores + at * 2, mask=valid, other=float("-inf"))
    token = tl.load(ids_in + at * 2, mask=valid, other=0)
    best = tl.max(score, 0)
    best_id = tl.min(tl.where(valid & (score == best), token, vocab), 0)
    sampled = tl.load(temperatures + row) > 0
    if HAS_ACTIVE:
        sampled = sampled & (tl.load(active + row) != 0)
    if FILTERED:
        if sampled & (best < float("inf")):
            take = tl.load(cuts + row * 2 + 1)
            upto = tl.cumsum(tl.load(tie_counts + at, mask=valid, other=0), 0)
            whole = valid & (upto <= take)
            tie_score = tl.load(scores + at * 2 + 1, mask=whole, other=float("-inf"))
            tie_token = tl.load(ids_in + at * 2 + 1, mask=whole, other=0)
            tie_best = tl.max(tie_score, 0)
            tie_id = tl.min(tl.where(whole & (tie_score == tie_best), tie_token, vocab), 0)
            if (tie_best > best) | ((tie_best == best) & (tie_id < best_id)):
                best = tie_best
                best_id = tie_id
            chunk = tl.sum(whole.to(tl.int32), 0)
            left = (take - tl.max(tl.where(whole, upto, 0), 0)).to(tl.int32)
            if (chunk < splits) & (left > 0):
                temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
                seed, position = tl.load(seeds + row), tl.load(positions + row)
                top = tl.max(load_maxima(maxima, row, groups, G), 0)
                least = least_fall(min_p)
                cut = tl.load(cuts + row * 2).to(tl.uint32)
                row_logits = logits + row * stride
                for step in range(tiles_each):
                    tile = chunk * tiles_each + step
                    ids, x = load_tile(row_logits, tile, vocab)
                    tied = (ids < vocab) & (sort_key(x) == cut)
                    first = tied & (tl.cumsum(tied.to(tl.int32), 0) <= left)
                    left -= tl.sum(first.to(tl.int32), 0)
                    best, best_id = offer(
                        row_logits,
                        tile,
                        x,
                        first & within(x, top, temperature, least),
                        best,
                        best_id,
                        top,
                        temperature,
                        min_p,
                        seed,
                        position,
                    )
    tl.store(tokens + row, tl.where(tl.abs(best) < float("inf"), best_id, -1).to(tl.int64))


def coupled_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    active: torch.Tensor | None = None,
    filtered: bool = True,
    found: Search | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """int64[M]: a token a row, as ``coupled_sample.coupled_sample`` draws it.

    ``logits`` float32 or bfloat16 [M, V], rows contiguous; ``temperatures`` float32[M]; ``top_ks``
    int32[M]; ``top_ps``, ``min_ps`` float32[M]; ``seeds``, ``positions`` int64[M].

    Where the temperature is not above 0 or ``active`` (bool or uint8 [M]) is 0, the token is the
    row's argmax, as ``greedy_argmax`` has it. Rows that hold a NaN or +inf, sampled ones with
    nothing but -inf and greedy ones with any infinity get -1. ``filtered`` False promises that no
    sampled row has top_k, top_p or min_p, and spares their launches; ``found`` is what
    ``search_cuts`` found of the same arguments. ``pdl``: programmatic dependent launch (Hopper and
    later).

    Noise is lost against a logit / temperature beyond 1e12: such rows have no defined draw.
    Raises ValueError for logits of another type or layout.
    """
    rows, vocab = logits.shape
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"logits are {logits.dtype}, not float32 or bfloat16")
    if vocab < 1:
        raise ValueError("logits have no columns, a vocabulary has at least one token")
    if logits.stride(1) != 1:
        raise ValueError("logits rows are not contiguous")
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return tokens
    if active is not None:
        active = active.view(torch.uint8)
    splits, tiles_each = split_row(rows, vocab)
    scores = torch.empty(rows, splits, 2, dtype=torch.float64, device=device)
    ids = torch.empty(rows, splits, 2, dtype=torch.int32, device=device)
    tie_counts = torch.empty(rows, splits, dtype=torch.int32, device=device)
    cuts = torch.empty(rows, 2, dtype=torch.int64, device=device)
    # Stand-ins for what an unfiltered draw never reads.
    search = [cuts] * 5
    groups = 1
    if filtered:
        if found is None:
            found = search_cuts(logits, temperatures, top_ks, top_ps, min_ps, active, pdl)
        search, groups = list(found), found.maxima.shape[1]
    mask = temperatures if active is None else active
    static = {
        "G": triton.next_power_of_2(groups),
        "FILTERED": filtered,
        "HAS_ACTIVE": active is not None,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    _draw[(splits, rows)](
        logits,
        logits.stride(0),
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        seeds,
        positions,
        mask,
        *search,
        cuts,
        scores,
        ids,
        tie_counts,
        vocab,
        groups,
        tiles_each,
        **static,
    )
    _pick[(rows,)](
        logits,
        logits.stride(0),
        temperatures,
        min_ps,
        seeds,
        positions,
        mask,
        search[0],
        cuts,
        scores,
        ids,
        tie_counts,
        tokens,
        vocab,
        groups,
        splits,
        tiles_each,
        S=triton.next_power_of_2(splits),
        **static,
    )
    return tokens
