"""Where the blocks of block drafts stand, in Triton: one program a row."""

import torch
import triton
import triton.language as tl

_PADDING = 64  # tokens that a program clears at once


@triton.jit(do_not_specialize=["tokens", "mask_token"])
def _block_layout(
    slots: tl.tensor,
    caps: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    bonus: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    cu_q: tl.tensor,
    kv_lens: tl.tensor,
    first: tl.tensor,
    places: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    table_stride: tl.tensor,
    first_row: tl.tensor,
    mask_token: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    DRAFTS: tl.constexpr,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
    PADDING: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    other = tl.arange(0, ROWS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    every_cap = tl.load(caps + other, mask=other < rows, other=0)
    lengths = tl.where(every_cap > 0, tl.minimum(every_cap, DRAFTS) + first_row, 0)
    begin = tl.sum(tl.where(other < row, lengths, 0), 0)
    total = tl.sum(lengths, 0)
    cap = tl.load(caps + row)
    drafts = cap > 0
    length = tl.where(drafts, tl.minimum(cap, DRAFTS) + first_row, 0)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(seq_lens + slot)
    newest = tl.load(bonus + slot)
    tl.store(cu_q + row, begin)
    tl.store(cu_q + row + 1, begin + length, mask=row == rows - 1)
    tl.store(kv_lens + row, tl.where(drafts, start + length, 0))
    tl.store(first + row, newest)

    inside = node < length
    position = start + node
    column = position // PAGE_SIZE
    page = tl.load(
        page_table + slot * table_stride + column, mask=inside & (column < columns), other=0
    )
    kv_slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    token = tl.where(node == 0, newest, mask_token.to(tl.int64))
    tl.store(ids + begin + node, token, mask=inside)
    tl.store(positions + begin + node, position.to(tl.int64), mask=inside)
    tl.store(kv_slots + begin + node, kv_slot, mask=inside)
    at = tl.where(drafts, begin + tl.minimum(node + first_row, length - 1), 0)
    tl.store(places + node * rows + row, at.to(tl.int64), mask=node < DRAFTS)

    zero = tl.zeros((PADDING,), dtype=tl.int64)
    for low in tl.range(total + row * PADDING, tokens, rows * PADDING):
        behind = low + tl.arange(0, PADDING)
        tl.store(ids + behind, zero, mask=behind < tokens)
        tl.store(positions + behind, zero, mask=behind < tokens)
        tl.store(kv_slots + behind, zero, mask=behind < tokens)


@triton.jit
def _keep_newest(
    slots: tl.tensor,
    accept_lens: tl.tensor,
    tokens: tl.tensor,
    bonus: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(accept_lens + row, mask=row < rows, other=0)
    kept = length > 0
    slot = tl.load(slots + row, mask=kept, other=0)
    token = tl.load(tokens + row.to(tl.int64) * stride + length - 1, mask=kept, other=0)
    tl.store(bonus + slot, token.to(tl.int64), mask=kept)


def block_layout(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    bonus: torch.Tensor,
    first_row: int,
    mask_token: int,
    *,
    ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    first: torch.Tensor,
    places: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Lay out one block for each of R rows, see the reference; outputs are contiguous.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    drafts, rows = places.shape
    if rows:
        _block_layout[(rows,)](
            slots,
            caps,
            seq_lens,
            page_table,
            bonus,
            ids,
            positions,
            kv_slots,
            cu_q,
            kv_lens,
            first,
            places,
            rows,
            len(ids),
            page_table.shape[1],
            page_table.stride(0),
            first_row,
            mask_token,
            PAGE_SIZE=page_size,
            DRAFTS=drafts,
            NODES=triton.next_power_of_2(drafts + first_row),
            ROWS=triton.next_power_of_2(rows),
            PADDING=_PADDING,
            PDL=pdl,
            num_warps=1 if rows <= 64 else 4,
            launch_pdl=pdl,
        )


def keep_newest(
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
    *,
    bonus: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Keep the newest of the tokens that each of R rows emitted, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    rows = len(slots)
    if rows:
        block = min(triton.next_power_of_2(rows), 128)
        _keep_newest[(triton.cdiv(rows, block),)](
            slots,
            accept_lens,
            tokens,
            bonus,
            rows,
            tokens.stride(0),
            BLOCK=block,
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
        )
