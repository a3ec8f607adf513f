# mypy: disable-error-code="no-untyped-call"

"""`block_verify` on the GPU: a pass over the laws of nodes with drafts, the drafts' ratios, a draw
and what is left of each node's share, and a pick along the chain.

The pass is rejection sampling's (:mod:`.law_gpu`). Nodes without drafts are ``coupled_sample``'s.
"""

import torch
import triton
import triton.language as tl

from .coupled_sample_gpu import coupled_sample
from .gumbel_gpu import load_tile, philox_words, screening_noise
from .law_gpu import (
    LawBuffers,
    draft_row_law,
    draft_tile_law,
    is_judged,
    lead,
    measure_laws,
    pick_drawn,
    row_law,
    tile_law,
)
from .logit_cut_gpu import BLOCK, search_cuts
from .noise_streams import ACCEPT, PLACES, RESIDUAL
from .rejection_sample import LEAST_HEAT

_ACCEPT = tl.constexpr(ACCEPT)
_RESIDUAL = tl.constexpr(RESIDUAL)
_LEAST_HEAT = tl.constexpr(LEAST_HEAT)
_WORD_SCALE = tl.constexpr(2.0**-32)
_PLACES = tl.constexpr(PLACES)


@triton.jit
def _note_ratios(
    logits: tl.tensor, stride: tl.tensor, temperatures: tl.tensor, min_ps: tl.tensor,
    active: tl.tensor, maxima: tl.tensor, tokens: tl.tensor, drafts: tl.tensor,
    draft_logits: tl.tensor, draft_stride: tl.tensor, draft_rows: tl.tensor, draft_ids: tl.tensor,
    cuts: tl.tensor, parts: tl.tensor, tie_counts: tl.tensor, ratios: tl.tensor, vocab: tl.tensor,
    draft_vocab: tl.tensor, groups: tl.tensor, splits: tl.tensor, tiles_each: tl.tensor,
    S: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """p / q of the node's draft, by the program that has its token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if not is_judged(tokens, drafts, temperatures, active, row):
        return
    draft = tl.load(drafts + row)
    begin = chunk * tiles_each
    if (draft < begin * BLOCK) | (draft >= (begin + tiles_each) * BLOCK):
        return
    heat, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top, cut, left, base, total = row_law(
        parts, tie_counts, cuts, maxima, row, chunk, splits, groups, heat, min_p, S, G
    )
    draft_heat = tl.maximum(heat, _LEAST_HEAT)
    columns, draft_base, draft_total = draft_row_law(parts, row, splits, draft_vocab, draft_heat, S)
    row_logits = draft_logits + tl.load(draft_rows + row).to(tl.int64) * draft_stride
    for step in range(tiles_each):
        tile = begin + step
        ids, x = load_tile(logits + row * stride, tile, vocab)
        p, left = tile_law(ids, x, top, cut, left, base, total, heat, min_p, vocab)
        if (draft >= tile * BLOCK) & (draft < tile * BLOCK + BLOCK):
            q = draft_tile_law(
                row_logits, draft_ids, ids, columns, draft_base, draft_total, draft_heat, vocab
            )
            p_d = tl.sum(tl.where(ids == draft, p, 0.0), 0).to(tl.float64)
            q_d = tl.sum(tl.where(ids == draft, q, 0.0), 0).to(tl.float64)
            tl.store(ratios + row, tl.where(q_d > 0, p_d / tl.where(q_d > 0, q_d, 1.0), 0.0))


@triton.jit
def _draw_beyond(
    logits: tl.tensor, stride: tl.tensor, temperatures: tl.tensor, min_ps: tl.tensor,
    seeds: tl.tensor, positions: tl.tensor, active: tl.tensor, maxima: tl.tensor,
    tokens: tl.tensor, drafts: tl.tensor, draft_logits: tl.tensor, draft_stride: tl.tensor,
    draft_rows: tl.tensor, draft_ids: tl.tensor, cuts: tl.tensor, parts: tl.tensor,
    tie_counts: tl.tensor, scores: tl.tensor, ids_out: tl.tensor, ratios: tl.tensor,
    firsts: tl.tensor, masses: tl.tensor, vocab: tl.tensor, draft_vocab: tl.tensor,
    groups: tl.tensor, splits: tl.tensor, tiles_each: tl.tensor, S: tl.constexpr,
    G: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Each program's share of what w p has beyond q, and its winners, of that and of p."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if not is_judged(tokens, drafts, temperatures, active, row):
        return
    share = tl.full((), 1.0, tl.float64)
    for node in range(tl.load(firsts + row), row):
        share = tl.minimum(share * tl.load(ratios + node), 1.0)
    w = share.to(tl.float32)
    heat, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top, cut, left, base, total = row_law(
        parts, tie_counts, cuts, maxima, row, chunk, splits, groups, heat, min_p, S, G
    )
    draft_heat = tl.maximum(heat, _LEAST_HEAT)
    columns, draft_base, draft_total = draft_row_law(parts, row, splits, draft_vocab, draft_heat, S)
    row_logits = draft_logits + tl.load(draft_rows + row).to(tl.int64) * draft_stride
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    mass = tl.zeros((), tl.float32)
    best = tl.full((), float("-inf"), tl.float32)
    best_id = tl.zeros((), tl.int32) + vocab
    whole = best
    whole_id = best_id
    for step in range(tiles_each):
        tile = chunk * tiles_each + step
        ids, x = load_tile(logits + row * stride, tile, vocab)
        p, left = tile_law(ids, x, top, cut, left, base, total, heat, min_p, vocab)
        q = draft_tile_law(
            row_logits, draft_ids, ids, columns, draft_base, draft_total, draft_heat, vocab
        )
        beyond = w * p - q
        mass += tl.sum(tl.maximum(beyond, 0.0), 0)
        noise = screening_noise(philox_words(seed ^ _RESIDUAL, position, tile * BLOCK, BLOCK))
        best, best_id = lead(best, best_id, beyond, noise, ids, vocab)
        whole, whole_id = lead(whole, whole_id, p, noise, ids, vocab)
    at = row * splits + chunk
    tl.store(masses + at, mass)
    tl.store(scores + at * 2, best)
    tl.store(scores + at * 2 + 1, whole)
    tl.store(ids_out + at * 2, best_id)
    tl.store(ids_out + at * 2 + 1, whole_id)


@triton.jit
def _pick_block(
    temperatures: tl.tensor, seeds: tl.tensor, positions: tl.tensor, active: tl.tensor,
    tokens: tl.tensor, drafts: tl.tensor, scores: tl.tensor, ids_in: tl.tensor, ratios: tl.tensor,
    firsts: tl.tensor, masses: tl.tensor, vocab: tl.tensor, splits: tl.tensor, S: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Along the node's chain, how many drafts it keeps; then the token of a node with a draft."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if not is_judged(tokens, drafts, temperatures, active, row):
        return
    part = tl.arange(0, S)
    first = tl.load(firsts + row)
    share = tl.full((), 1.0, tl.float64)
    kept = tl.zeros((), tl.int64)
    depth = tl.zeros((), tl.int64)
    held = depth == 0
    while held:
        share = tl.minimum(share * tl.load(ratios + first + depth), 1.0)
        depth += 1
        node = first + depth
        held = tl.load(drafts + node) >= 0
        chance = share
        if held & (share > 0) & (share < 1):
            some = tl.load(masses + node * splits + part, mask=part < splits, other=0.0)
            mass = tl.sum(some, 0).to(tl.float64)
            chance = mass / (mass + 1.0 - share)
        place = (tl.load(positions + node) - depth) * _PLACES + depth
        words = philox_words(tl.load(seeds + node) ^ _ACCEPT, place, tl.zeros((), tl.int32), 8)
        word = tl.max(tl.where(tl.arange(0, 8) == 0, words, 0), 0)
        u = (word.to(tl.float64) + 0.5) * _WORD_SCALE
        kept = tl.where(u < chance, depth, kept)
    ahead = kept - (row - first)
    if ahead > 0:
        tl.store(tokens + row, tl.load(drafts + row))
    if ahead == 0:
        tl.store(tokens + row, pick_drawn(scores, ids_in, row, splits, vocab, S))


def block_verify(
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
    """int64[M]: the token of each node, see ``block_verify_cpu``.

    ``logits`` float32 or bfloat16, rows contiguous, as those of ``draft_logits`` of any float
    dtype. Where ``active`` (bool or uint8 [M]) is 0, for all nodes of a chain or none, the token is
    the row's argmax. Unusable rows get -1, and no draft behind them is kept. ``pdl``: programmatic
    dependent launch (Hopper and later). Raises ValueError for another layout, and where
    ``coupled_sample`` does.
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
    buffers = LawBuffers(logits, found)
    splits, groups = buffers.splits, buffers.groups
    device = logits.device
    ratios = torch.zeros(rows, dtype=torch.float64, device=device)
    masses = torch.zeros(rows, splits, dtype=torch.float32, device=device)
    node = torch.arange(rows, device=device)
    led = torch.zeros_like(active, dtype=torch.bool)
    led[1:] = drafts[:-1] >= 0
    firsts = torch.where(led, 0, node).cummax(0).values
    static = {"PDL": pdl, "launch_pdl": pdl}
    span = {"G": triton.next_power_of_2(groups), **static}
    lanes = triton.next_power_of_2(splits)
    measure_laws[(splits, rows)](
        logits, logits.stride(0), temperatures, top_ks, top_ps, min_ps, active, *found, tokens,
        drafts, draft_logits, draft_logits.stride(0), draft_rows, buffers.cuts, buffers.parts,
        buffers.tie_counts, vocab, draft_vocab, groups, buffers.tiles_each, **span,
    )  # fmt: skip
    _note_ratios[(splits, rows)](
        logits, logits.stride(0), temperatures, min_ps, active, found.maxima, tokens, drafts,
        draft_logits, draft_logits.stride(0), draft_rows, draft_ids, buffers.cuts, buffers.parts,
        buffers.tie_counts, ratios, vocab, draft_vocab, groups, splits, buffers.tiles_each,
        S=lanes, **span,
    )  # fmt: skip
    _draw_beyond[(splits, rows)](
        logits, logits.stride(0), temperatures, min_ps, seeds, positions, active, found.maxima,
        tokens, drafts, draft_logits, draft_logits.stride(0), draft_rows, draft_ids, buffers.cuts,
        buffers.parts, buffers.tie_counts, buffers.scores, buffers.ids, ratios, firsts, masses,
        vocab, draft_vocab, groups, splits, buffers.tiles_each, S=lanes, **span,
    )  # fmt: skip
    _pick_block[(rows,)](
        temperatures, seeds, positions, active, tokens, drafts, buffers.scores, buffers.ids,
        ratios, firsts, masses, vocab, splits, S=lanes, **static,
    )  # fmt: skip
    return tokens
