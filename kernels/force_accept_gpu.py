# mypy: disable-error-code="no-untyped-call"
"""Drafts and targets whose walk accepts drawn lengths on a GPU, one program a row.

A node's ancestors are known from its mask, so nothing is walked.
"""

import torch
import triton
import triton.language as tl

_NODES = tl.constexpr(64)  # most nodes of a row


def force_accept(
    targets: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    tree_bits: torch.Tensor,
    host_parents: torch.Tensor,
    cu_q: torch.Tensor,
    node_cu: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    *,
    floor: int,
    threshold: int,
    tokens: torch.Tensor,
) -> None:
    """Force R rows to accept drawn lengths, see the reference."""
    rows = slots.shape[0]
    if rows:
        _force_kernel[(rows,)](
            targets,
            input_ids,
            positions,
            tree_bits,
            host_parents,
            cu_q,
            node_cu,
            slots,
            starts,
            tokens,
            FLOOR=floor,
            THRESHOLD=threshold,
            num_warps=1,
        )


@triton.jit
def _force_kernel(
    targets: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    tree_bits: tl.tensor,
    host_parents: tl.tensor,
    cu_q: tl.tensor,
    node_cu: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    tokens: tl.tensor,
    FLOOR: tl.constexpr,
    THRESHOLD: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    node = tl.arange(0, _NODES)
    width = tl.load(node_cu + row + 1) - tl.load(node_cu + row)
    if width > 1:
        wants = targets + tl.load(node_cu + row)
        first = tl.load(cu_q + row + 1) - width
        start = tl.load(starts + row)
        draw = (_mix(tl.load(slots + row), start) >> 40).to(tl.int64)
        length = FLOOR + (draw < THRESHOLD).to(tl.int64)
        inside = node < width
        drafted = inside & (node > 0)
        parent = tl.load(host_parents + first + node, mask=drafted, other=-1)
        known = (node == 0) | (parent >= 0)  # no padding
        depth = tl.load(positions + first + node, mask=inside, other=0) - start
        deepest = tl.max(tl.where(known, depth * _NODES + (_NODES - 1 - node), 0), 0)
        path = tl.load(tree_bits + first + (_NODES - 1 - deepest % _NODES))
        accepted = (parent >= 0) & ((path >> node) & 1 == 1) & (depth < length)
        draft = tl.load(input_ids + first + node, mask=accepted, other=-1)
        tl.store(tokens + first + node, draft, mask=drafted)
        # On one path no two nodes have the same parent.
        wanted = tl.load(wants + parent, mask=accepted, other=-1)
        tl.store(wants + parent, draft, mask=wanted >= 0)


@triton.jit
def _mix(slot: tl.tensor, position: tl.tensor) -> tl.tensor:
    """64 mixed bits of (slot, position): SplitMix64's output function."""
    word = (slot.to(tl.uint64) << 32) | position.to(tl.uint64)
    word = word * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    word = (word ^ (word >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    word = (word ^ (word >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return word ^ (word >> 31)
