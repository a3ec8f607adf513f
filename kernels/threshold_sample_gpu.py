# mypy: disable-error-code="no-untyped-call"

"""`threshold_sample` on the GPU: a pass over the laws of nodes with children, a draw, and a pick.

The pass measures what the law sums to (:mod:`.law_gpu`); the draw takes the children's tokens out
of it and notes what they had, which the pick adds up. Other nodes are ``coupled_sample``'s.
"""

import torch
import triton
import triton.language as tl

from .coupled_sample_gpu import coupled_sample
from .gumbel_gpu import load_tile, philox_words, screening_noise
from .law_gpu import LawBuffers, is_judged, lead, measure_laws, pick_drawn, row_law, tile_law
from .logit_cut_gpu import BLOCK, search_cuts
from .noise_streams import ACCEPT, RESIDUAL
from .threshold_sample import LEAST, Thresholds

_ACCEPT = tl.constexpr(ACCEPT)
_RESIDUAL = tl.constexpr(RESIDUAL)
_WORD_SCALE = tl.constexpr(2.0**-32)
_LANES = tl.constexpr(64)  # a node's children are among so many nodes from its own on


@triton.jit
def _children(parents: tl.tensor, row: tl.tensor, rows: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The nodes from ``row`` on, and which of them are its children."""
    node = row + tl.arange(0, _LANES)
    return node, tl.load(parents + node, mask=node < rows, other=-1) == row


@triton.jit
def _draw_untried(
    logits: tl.tensor, stride: tl.tensor, temperatures: tl.tensor, min_ps: tl.tensor,
    seeds: tl.tensor, positions: tl.tensor, active: tl.tensor, maxima: tl.tensor,
    tokens: tl.tensor, tries: tl.tensor, drafts: tl.tensor, parents: tl.tensor, cuts: tl.tensor,
    parts: tl.tensor, tie_counts: tl.tensor, scores: tl.tensor, ids_out: tl.tensor,
    chances: tl.tensor, vocab: tl.tensor, rows: tl.tensor, groups: tl.tensor, splits: tl.tensor,
    tiles_each: tl.tensor, S: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Each program's winners, of p without the children's tokens and of p, and p of those."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if not is_judged(tokens, tries, temperatures, active, row):
        return
    heat, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top, cut, left, base, total = row_law(
        parts, tie_counts, cuts, maxima, row, chunk, splits, groups, heat, min_p, S, G
    )
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    node, child = _children(parents, row, rows)
    draft = tl.load(drafts + node, mask=child, other=-1)
    best = tl.full((), float("-inf"), tl.float32)
    best_id = tl.zeros((), tl.int32) + vocab
    whole = best
    whole_id = best_id
    for step in range(tiles_each):
        tile = chunk * tiles_each + step
        ids, x = load_tile(logits + row * stride, tile, vocab)
        p, left = tile_law(ids, x, top, cut, left, base, total, heat, min_p, vocab)
        noise = screening_noise(philox_words(seed ^ _RESIDUAL, position, tile * BLOCK, BLOCK))
        whole, whole_id = lead(whole, whole_id, p, noise, ids, vocab)
        here = child & (draft >= tile * BLOCK) & (draft < tile * BLOCK + BLOCK)
        rest = p
        token = tl.max(tl.where(here, draft, -1), 0)
        while token >= 0:
            same = here & (draft == token)
            chance = tl.sum(tl.where(ids == token, p, 0.0), 0)
            tl.store(chances + node, tl.zeros_like(draft).to(tl.float32) + chance, mask=same)
            rest = tl.where(ids == token, 0.0, rest)
            here = here & (draft != token)
            token = tl.max(tl.where(here, draft, -1), 0)
        best, best_id = lead(best, best_id, rest, noise, ids, vocab)
    at = (row * splits + chunk) * 2
    tl.store(scores + at, best)
    tl.store(scores + at + 1, whole)
    tl.store(ids_out + at, best_id)
    tl.store(ids_out + at + 1, whole_id)


@triton.jit
def _pick_child(
    temperatures: tl.tensor, seeds: tl.tensor, positions: tl.tensor, active: tl.tensor,
    tokens: tl.tensor, tries: tl.tensor, drafts: tl.tensor, parents: tl.tensor, scores: tl.tensor,
    ids_in: tl.tensor, chances: tl.tensor, single: tl.tensor, scale: tl.tensor, vocab: tl.tensor,
    rows: tl.tensor, splits: tl.tensor, S: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The node's token: the first child that passes, or the best of its programs' winners."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if not is_judged(tokens, tries, temperatures, active, row):
        return
    node, child = _children(parents, row, rows)
    draft = tl.load(drafts + node, mask=child, other=-1)
    lane = tl.arange(0, _LANES)
    twice = (draft[:, None] == draft[None, :]) & (lane[None, :] < lane[:, None]) & child[None, :]
    child = child & (tl.max(twice.to(tl.int32), 1) == 0)
    chance = tl.load(chances + node, mask=child, other=0.0)
    tried = tl.cumsum(chance.to(tl.float64), 0)
    words = philox_words(
        tl.load(seeds + row) ^ _ACCEPT, tl.load(positions + row), tl.zeros((), tl.int32), 8
    )
    word = tl.max(tl.where(tl.arange(0, 8) == 0, words, 0), 0)
    u = (word.to(tl.float64) + 0.5) * _WORD_SCALE
    passes = child & (chance > 0) & ((u * scale < tried) | (chance >= single))
    first = tl.min(tl.where(passes, lane, _LANES), 0)
    kept = tl.sum(tl.where(lane == first, draft, 0), 0)
    drawn = pick_drawn(scores, ids_in, row, splits, vocab, S)
    tl.store(tokens + row, tl.where(first < _LANES, kept, drawn))


def threshold_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    thresholds: Thresholds,
    *,
    active: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """int64[M]: the token of each node, see the reference.

    ``logits`` float32 or bfloat16, rows contiguous. The children of a node are among the 63 nodes
    behind it. Where ``active`` (bool or uint8 [M]) is 0 the token is the row's argmax. ``pdl``:
    programmatic dependent launch (Hopper and later). Raises ValueError where ``coupled_sample``
    does.
    """
    rows, vocab = logits.shape
    active = active.view(torch.uint8)
    found = search_cuts(logits, temperatures, top_ks, top_ps, min_ps, active, pdl) if rows else None
    tokens = coupled_sample(
        logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, active=active, found=found,
        pdl=pdl,
    )  # fmt: skip
    if found is None:
        return tokens
    # Nodes without a parent make the one behind the last try.
    tries = torch.full((rows + 1,), -1, dtype=torch.int64, device=logits.device)
    tries.index_fill_(0, torch.where(parents < 0, rows, parents), 0)
    buffers = LawBuffers(logits, found)
    splits, groups = buffers.splits, buffers.groups
    chances = torch.empty(rows, dtype=torch.float32, device=logits.device)
    static = {"PDL": pdl, "launch_pdl": pdl}
    span = {"G": triton.next_power_of_2(groups), **static}
    lanes = triton.next_power_of_2(splits)
    measure_laws[(splits, rows)](
        logits, logits.stride(0), temperatures, top_ks, top_ps, min_ps, active, *found, tokens,
        tries, None, 0, None, buffers.cuts, buffers.parts, buffers.tie_counts, vocab, 0, groups,
        buffers.tiles_each, **span,
    )  # fmt: skip
    _draw_untried[(splits, rows)](
        logits, logits.stride(0), temperatures, min_ps, seeds, positions, active, found.maxima,
        tokens, tries, drafts, parents, buffers.cuts, buffers.parts, buffers.tie_counts,
        buffers.scores, buffers.ids, chances, vocab, rows, groups, splits, buffers.tiles_each,
        S=lanes, **span,
    )  # fmt: skip
    _pick_child[(rows,)](
        temperatures, seeds, positions, active, tokens, tries, drafts, parents, buffers.scores,
        buffers.ids, chances, thresholds.single, max(thresholds.acc, LEAST), vocab, rows, splits,
        S=lanes, **static,
    )  # fmt: skip
    return tokens
