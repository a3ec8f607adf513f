"""A draft tree's next level in Triton: one program a row."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["level", "begin"])
def _expand_tree(
    chances: tl.tensor,
    successors: tl.tensor,
    reach: tl.tensor,
    scores: tl.tensor,
    candidates: tl.tensor,
    beams: tl.tensor,
    ids: tl.tensor,
    bits: tl.tensor,
    parents: tl.tensor,
    level: tl.tensor,
    begin: tl.tensor,
    scores_stride: tl.tensor,
    beams_stride: tl.tensor,
    nodes_stride: tl.tensor,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH * WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    above = tl.load(reach + row * WIDTH + lane // WIDTH, mask=inside, other=0.0)
    chance = tl.load(chances + row * (WIDTH * WIDTH) + lane, mask=inside, other=0.0)
    token = tl.load(successors + row * (WIDTH * WIDTH) + lane, mask=inside, other=0)
    score = above * chance
    tl.store(scores + row * scores_stride + begin + lane, score, mask=inside)
    tl.store(candidates + row * scores_stride + begin + lane, token, mask=inside)
    if not LAST:
        # All lanes have read what the new beam takes the place of.
        tl.debug_barrier()
        left = inside
        for k in tl.static_range(WIDTH):
            best = tl.max(tl.where(left, score, -1.0), 0)
            place = tl.min(tl.where(left & (score == best), lane, LANES), 0)
            left = left & (lane != place)
            node = level * WIDTH + k
            parent = place // WIDTH
            seen = tl.load(bits + row * nodes_stride + (level - 1) * WIDTH + parent)
            own = (seen * 0 + 1) << node
            tl.store(reach + row * WIDTH + k, best)
            tl.store(parents + row * WIDTH + k, parent.to(tl.int64))
            tl.store(beams + row * beams_stride + level * WIDTH + k, (begin + place).to(tl.int64))
            tl.store(bits + row * nodes_stride + node, seen | own)
            chosen = tl.sum(tl.where(lane == place, token, 0), 0)
            tl.store(ids + row * nodes_stride + node, chosen)


def expand_tree(
    level: int,
    chances: torch.Tensor,
    successors: torch.Tensor,
    *,
    reach: torch.Tensor,
    scores: torch.Tensor,
    candidates: torch.Tensor,
    beams: torch.Tensor,
    ids: torch.Tensor,
    bits: torch.Tensor,
    parents: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Grow R trees by a level, see the reference; all tensors are contiguous.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    rows, width = reach.shape
    if rows:
        _expand_tree[(rows,)](
            chances,
            successors,
            reach,
            scores,
            candidates,
            beams,
            ids,
            bits,
            parents,
            level,
            width + (level - 1) * width * width,
            scores.stride(0),
            beams.stride(0),
            bits.stride(0),
            WIDTH=width,
            LANES=triton.next_power_of_2(width * width),
            LAST=level >= beams.shape[1],
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
        )
