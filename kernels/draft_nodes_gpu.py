"""Drafts into the places that a step keeps for them, in Triton: one program a row."""

import torch
import triton
import triton.language as tl


@triton.jit
def _write_chains(
    drafts: tl.tensor,
    cu_q: tl.tensor,
    caps: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    proposed: tl.tensor,
    depths: tl.tensor,
    most: tl.tensor,
    stride: tl.tensor,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    cap = tl.load(caps + row)
    begin = tl.load(cu_q + row) + 1
    for low in range(0, cap, LANES):
        node = low + tl.arange(0, LANES)
        real = node < tl.minimum(cap, most)
        token = tl.load(drafts + node * stride + row, mask=real, other=0)
        tl.store(tokens + begin + node, token.to(tl.int32), mask=node < cap)
        tl.store(parents + begin + node, tl.where(real, node, -1), mask=node < cap)
    tl.store(proposed + row, tl.minimum(cap, most))
    tl.store(depths + row, tl.minimum(cap, most))


def write_chains(
    drafts: torch.Tensor,
    cu_q: torch.Tensor,
    caps: torch.Tensor,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    proposed: torch.Tensor,
    depths: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Write the first caps[r] of N drafts of each of R rows as a chain, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    most, rows = drafts.shape
    if rows:
        _write_chains[(rows,)](
            drafts,
            cu_q,
            caps,
            tokens,
            parents,
            proposed,
            depths,
            most,
            drafts.stride(0),
            LANES=32,
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
        )


@triton.jit
def _select_tree(
    scores: tl.tensor,
    candidates: tl.tensor,
    beams: tl.tensor,
    cu_q: tl.tensor,
    caps: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    proposed: tl.tensor,
    depths: tl.tensor,
    columns: tl.tensor,
    beams_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    cap = tl.load(caps + row)
    count = tl.minimum(cap, columns)
    deepest = 0
    if cap > 0:
        flat = tl.arange(0, BLOCK)
        inside = flat < columns
        scores += row.to(tl.int64) * columns
        score = tl.load(scores + flat, mask=inside, other=-1.0)
        # A candidate's rank is how many stand before it.
        rank = tl.zeros([BLOCK], tl.int32)
        for low in range(0, columns, PART):
            other = low + tl.arange(0, PART)
            theirs = tl.load(scores + other, mask=other < columns, other=-1.0)
            ahead = (theirs[None, :] > score[:, None]) | (
                (theirs[None, :] == score[:, None]) & (other[None, :] < flat[:, None])
            )
            ahead = ahead & (other < columns)[None, :]
            rank += tl.sum(ahead.to(tl.int32), 1)
        is_last = inside & (rank == count - 1)
        least = tl.max(tl.where(is_last, score, -1.0), 0)
        last = tl.max(tl.where(is_last, flat, -1), 0)
        chosen = inside & (rank < count)
        # Beyond level 1, K * K a level, K of each beam node.
        above = tl.maximum(flat - WIDTH, 0)
        level = tl.where(flat < WIDTH, 0, 1 + above // (WIDTH * WIDTH))
        beam = tl.maximum(level - 1, 0) * WIDTH + above % (WIDTH * WIDTH) // WIDTH
        parent = tl.load(
            beams + row.to(tl.int64) * beams_stride + beam, mask=chosen & (level > 0), other=-1
        ).to(tl.int32)
        # A chosen node's number is how many chosen ones have flat ids up to its own.
        number = tl.zeros([BLOCK], tl.int32)
        parent_number = tl.zeros([BLOCK], tl.int32)
        for low in range(0, columns, PART):
            other = low + tl.arange(0, PART)
            theirs = tl.load(scores + other, mask=other < columns, other=-1.0)
            counts = (theirs > least) | ((theirs == least) & (other <= last))
            counts = (counts & (other < columns))[None, :]
            number += tl.sum((counts & (other[None, :] <= flat[:, None])).to(tl.int32), 1)
            below = counts & (other[None, :] <= parent[:, None])
            parent_number += tl.sum(below.to(tl.int32), 1)
        begin = tl.load(cu_q + row)
        at = row.to(tl.int64) * columns + flat
        token = tl.load(candidates + at, mask=chosen, other=0)
        tl.store(tokens + begin + number, token.to(tl.int32), mask=chosen)
        tl.store(parents + begin + number, parent_number, mask=chosen)
        for low in range(count, cap, PART):
            node = low + tl.arange(0, PART)
            tl.store(tokens + begin + 1 + node, tl.zeros([PART], tl.int32), mask=node < cap)
            tl.store(parents + begin + 1 + node, tl.full([PART], -1, tl.int32), mask=node < cap)
        deepest = tl.max(tl.where(chosen, level + 1, 0), 0)
    tl.store(proposed + row, count)
    tl.store(depths + row, deepest)


def select_tree(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    beams: torch.Tensor,
    cu_q: torch.Tensor,
    caps: torch.Tensor,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    proposed: torch.Tensor,
    depths: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Write the best caps[r] of C candidates of each of R rows as a tree, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    rows, columns = scores.shape
    if rows:
        block = max(16, triton.next_power_of_2(columns))
        _select_tree[(rows,)](
            scores,
            candidates,
            beams,
            cu_q,
            caps,
            tokens,
            parents,
            proposed,
            depths,
            columns,
            beams.stride(0),
            WIDTH=beams.shape[2],
            BLOCK=block,
            PART=16,
            PDL=pdl,
            num_warps=min(8, max(1, block // 32)),
            launch_pdl=pdl,
        )
