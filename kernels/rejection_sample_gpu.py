# mypy: disable-error-code="no-untyped-call"

"""`rejection_sample` on the GPU: two passes over the laws of nodes with drafts, and a pick.

The first measures what both laws sum to (:mod:`.law_gpu`), the second draws from what p has beyond
q. Nodes without drafts are ``coupled_sample``'s.
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
from .noise_streams import ACCEPT, RESIDUAL
from .rejection_sample import LEAST_HEAT

_ACCEPT = tl.constexpr(ACCEPT)
_RESIDUAL = tl.constexpr(RESIDUAL)
_LEAST_HEAT = tl.constexpr(LEAST_HEAT)
_WORD_SCALE = tl.constexpr(2.0**-32)


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
    if not is_judged(tokens, drafts, temperatures, active, row):
        return
    heat, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top, cut, left, base, total = row_law(
        parts, tie_counts, cuts, maxima, row, chunk, splits, groups, heat, min_p, S, G
    )
    draft_heat = tl.maximum(heat, _LEAST_HEAT)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    draft, draft_row = tl.load(drafts + row), tl.load(draft_rows + row).to(tl.int64)
    columns, draft_base, draft_total = draft_row_law(parts, row, splits, draft_vocab, draft_heat, S)
    row_logits = draft_logits + draft_row * draft_stride
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
        words = philox_words(seed ^ _RESIDUAL, position, tile * BLOCK, BLOCK)
        noise = screening_noise(words)
        best, best_id = lead(best, best_id, p - q, noise, ids, vocab)
        whole, whole_id = lead(whole, whole_id, p, noise, ids, vocab)
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
    if not is_judged(tokens, drafts, temperatures, active, row):
        return
    drawn = pick_drawn(scores, ids_in, row, splits, vocab, S)
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
    buffers = LawBuffers(logits, found)
    splits, groups = buffers.splits, buffers.groups
    accepted = torch.empty(rows, dtype=torch.int32, device=logits.device)
    static = {"PDL": pdl, "launch_pdl": pdl}
    span = {"G": triton.next_power_of_2(groups), **static}
    lanes = triton.next_power_of_2(splits)
    measure_laws[(splits, rows)](
        logits, logits.stride(0), temperatures, top_ks, top_ps, min_ps, active, *found, tokens,
        drafts, draft_logits, draft_logits.stride(0), draft_rows, buffers.cuts, buffers.parts,
        buffers.tie_counts, vocab, draft_vocab, groups, buffers.tiles_each, **span,
    )  # fmt: skip
    _draw_left[(splits, rows)](
        logits, logits.stride(0), temperatures, min_ps, seeds, positions, active, found.maxima,
        tokens, drafts, draft_logits, draft_logits.stride(0), draft_rows, draft_ids, buffers.cuts,
        buffers.parts, buffers.tie_counts, buffers.scores, buffers.ids, accepted, vocab,
        draft_vocab, groups, splits, buffers.tiles_each, S=lanes, **span,
    )  # fmt: skip
    _pick_left[(rows,)](
        temperatures, active, tokens, drafts, buffers.scores, buffers.ids, accepted, vocab, splits,
        S=lanes, **static,
    )  # fmt: skip
    return tokens
