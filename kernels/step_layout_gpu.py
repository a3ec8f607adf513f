"""The rows of a step laid out as the flat batch that the model consumes, on a GPU.

A program takes one row, or a share of a long row's tokens; the last row's programs fill the
padding. A verify row's nodes fit one block, so each of its lanes walks up its own ancestors.
"""

import torch
import triton
import triton.language as tl

_VERIFY = tl.constexpr(2)
_MOST_BLOCKS = 32


def lay_out(
    slots: torch.Tensor,
    kinds: torch.Tensor,
    starts: torch.Tensor,
    cu_q: torch.Tensor,
    host_tokens: torch.Tensor,
    host_parents: torch.Tensor,
    seq_lens: torch.Tensor,
    last_tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
    tree_bits: torch.Tensor,
    is_tree: torch.Tensor,
    starts_before: torch.Tensor,
    longest: int | None = None,
) -> None:
    """Resolve R rows against the slots' state and write their T tokens, see the reference.

    ``longest``: query tokens that a row is expected to have at most (the draft width of a
    decode-only graph), T if unknown. It sets how many programs share a row, not the result.
    """
    rows, tokens = slots.shape[0], input_ids.shape[0]
    width = tokens if longest is None else min(longest, tokens)
    block = 64 if width <= 64 else 256
    blocks = min(max(1, triton.cdiv(width, block)), _MOST_BLOCKS)
    _lay_out_kernel[(rows + 1, blocks)](
        slots,
        kinds,
        starts,
        cu_q,
        host_tokens,
        host_parents,
        seq_lens,
        last_tokens,
        page_table,
        input_ids,
        positions,
        kv_slots,
        kv_lens,
        tree_bits,
        is_tree,
        starts_before,
        rows,
        tokens,
        page_table.shape[1],
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=block,
        num_warps=block // 64,
    )


@triton.jit
def _lay_out_kernel(
    slots: tl.tensor,
    kinds: tl.tensor,
    starts: tl.tensor,
    cu_q: tl.tensor,
    host_tokens: tl.tensor,
    host_parents: tl.tensor,
    seq_lens: tl.tensor,
    last_tokens: tl.tensor,
    page_table: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    kv_lens: tl.tensor,
    tree_bits: tl.tensor,
    is_tree: tl.tensor,
    starts_before: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    lane = tl.arange(0, BLOCK)
    begin = tl.load(cu_q + row)
    if row == rows:
        for low in range(begin + first, tokens, step):
            token = low + lane
            inside = token < tokens
            nothing = tl.zeros([BLOCK], tl.int64)
            tl.store(input_ids + token, nothing, mask=inside)
            tl.store(positions + token, nothing, mask=inside)
            tl.store(kv_slots + token, nothing, mask=inside)
            tl.store(tree_bits + token, nothing, mask=inside)
    else:
        length = tl.load(cu_q + row + 1) - begin
        real = length > 0
        slot = tl.load(slots + row).to(tl.int64)
        verify = tl.load(kinds + row).to(tl.int32) == _VERIFY
        known = tl.load(starts + row)
        stored = tl.load(seq_lens + slot, mask=real & verify, other=0)
        last = tl.load(last_tokens + slot, mask=real & verify, other=0)
        start = tl.where(verify, stored, tl.where(real, known, 0))
        branches = 0
        for low in range(first, length, step):
            index = low + lane
            inside = index < length
            depth = index
            bits = _chain_bits(index)
            if verify:
                nodes = host_parents + begin
                drafted = inside & (index > 0)
                given = tl.load(nodes + index, mask=drafted, other=-1)
                strays = drafted & (given >= 0) & (given != index - 1)
                branches = tl.max(strays.to(tl.int32), 0)
                if branches > 0:
                    bits, depth = _walk_up(nodes, given, index)
            ids = tl.load(host_tokens + begin + index, mask=inside, other=0)
            ids = tl.where(verify & (index == 0), last, ids)
            tl.store(input_ids + begin + index, ids.to(tl.int64), mask=inside)
            tl.store(positions + begin + index, (start + depth).to(tl.int64), mask=inside)
            tl.store(tree_bits + begin + index, bits, mask=inside)
            place = start + index
            column = place // PAGE_SIZE
            mapped = inside & (column < columns)
            page = tl.load(page_table + slot * table_stride + column, mask=mapped, other=0)
            kv_slot = page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE
            tl.store(kv_slots + begin + index, kv_slot, mask=inside)
        if first == 0:
            tl.store(kv_lens + row, start + length)
            tl.store(starts_before + row, start)
            tl.store(is_tree + row, branches)


@triton.jit
def _chain_bits(index: tl.tensor) -> tl.tensor:
    """int64: bits 0..index, all of them from 63 on."""
    one = tl.full(index.shape, 1, tl.int64)
    below = (one << (tl.minimum(index, 62) + 1).to(tl.int64)) - 1
    return tl.where(index < 63, below, -one)


@triton.jit
def _walk_up(nodes: tl.tensor, parent: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Ancestor sets (itself included) and depths of nodes 0..63, each lane from its own node."""
    one = tl.full(index.shape, 1, tl.int64)
    bits = one << (index & 63).to(tl.int64)
    depth = tl.zeros_like(index)
    # A parent lies below its child; the minimum keeps even a broken tree from looping.
    node = tl.minimum(parent, index - 1)
    while tl.max(node, 0) >= 0:
        above = node >= 0
        bits = bits | tl.where(above, one << (node & 63).to(tl.int64), 0)
        depth += above.to(tl.int32)
        higher = tl.load(nodes + node, mask=node > 0, other=-1)
        node = tl.minimum(higher, node - 1)
    return bits, depth
