"""What a draft with a window's pool reads and writes of it, in Triton."""

import torch
import triton
import triton.language as tl

_BLOCK = 256
_COLUMNS = 1024  # of a view's pages, at once
_NODES = 16  # of a block, at once
_PADDING = 64  # tokens that a program clears at once


@triton.jit
def _apply_window(
    table: tl.tensor,
    lows: tl.tensor,
    pages: tl.tensor,
    drafts: tl.tensor,
    count: tl.tensor,
    slots: tl.tensor,
    row_lows: tl.tensor,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = at < tl.load(count)
    page = tl.load(pages + at, mask=used, other=0)
    tl.store(table + page, tl.load(drafts + at, mask=used, other=0), mask=used)
    real = at < rows
    slot = tl.load(slots + at, mask=real, other=0)
    tl.store(lows + slot, tl.load(row_lows + at, mask=real, other=0), mask=real)


@triton.jit
def _window_starts(
    slots: tl.tensor,
    caps: tl.tensor,
    seq_lens: tl.tensor,
    lows: tl.tensor,
    starts: tl.tensor,
    block_caps: tl.tensor,
    rows: tl.tensor,
    window: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    real = row < rows
    slot = tl.load(slots + row, mask=real, other=0)
    cap = tl.load(caps + row, mask=real, other=0)
    length = tl.load(seq_lens + slot, mask=real, other=0)
    low = tl.load(lows + slot, mask=real, other=0)
    aligned = tl.maximum(length - window, 0) // PAGE_SIZE * PAGE_SIZE
    whole = (low + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE
    start = tl.maximum(aligned, whole)
    tl.store(starts + row, start, mask=real)
    tl.store(block_caps + row, tl.where(start <= length, cap, 0), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _window_layout(
    slots: tl.tensor,
    starts: tl.tensor,
    cu_q: tl.tensor,
    positions: tl.tensor,
    page_table: tl.tensor,
    table: tl.tensor,
    kv_slots: tl.tensor,
    kv_lens: tl.tensor,
    places: tl.tensor,
    pages: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    view: tl.tensor,
    table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDING: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(cu_q + row)
    length = tl.load(cu_q + row + 1) - begin
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    end = tl.load(kv_lens + row)

    for low in tl.range(0, length, NODES):
        node = low + tl.arange(0, NODES)
        inside = node < length
        kv_slot = tl.load(kv_slots + begin + node, mask=inside, other=0)
        page = tl.load(table + kv_slot // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        tl.store(kv_slots + begin + node, page * PAGE_SIZE + kv_slot % PAGE_SIZE, mask=inside)
        position = tl.load(positions + begin + node, mask=inside, other=0)
        tl.store(places + begin + node, position - start, mask=inside)
    tl.store(kv_lens + row, tl.maximum(end - start, 0))

    target = page_table + slot * table_stride
    for low in tl.range(0, view, COLUMNS):
        column = low + tl.arange(0, COLUMNS)
        at = start // PAGE_SIZE + column
        read = (column < view) & (at < columns) & (at * PAGE_SIZE < end)
        mapped = tl.load(target + at, mask=read, other=0)
        draft = tl.load(table + mapped, mask=read, other=0)
        tl.store(pages + row.to(tl.int64) * view + column, draft, mask=column < view)

    total = tl.load(cu_q + rows)
    zero = tl.zeros((PADDING,), dtype=tl.int64)
    for low in tl.range(total + row * PADDING, tokens, rows * PADDING):
        behind = low + tl.arange(0, PADDING)
        tl.store(places + behind, zero, mask=behind < tokens)


@triton.jit
def _draft_slots(
    kv_slots: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    real = token < tokens
    kv_slot = tl.load(kv_slots + token, mask=real, other=0)
    page = tl.load(table + kv_slot // PAGE_SIZE, mask=real, other=0).to(tl.int64)
    tl.store(out + token, page * PAGE_SIZE + kv_slot % PAGE_SIZE, mask=real)


def apply_window(
    table: torch.Tensor,
    lows: torch.Tensor,
    pages: torch.Tensor,
    drafts: torch.Tensor,
    count: torch.Tensor,
    slots: torch.Tensor,
    row_lows: torch.Tensor,
) -> None:
    """Change ``table`` and ``lows``, see the reference."""
    most = max(len(pages), len(slots))
    if most:
        _apply_window[(triton.cdiv(most, _BLOCK),)](
            table, lows, pages, drafts, count, slots, row_lows, len(slots), BLOCK=_BLOCK
        )


def window_starts(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    lows: torch.Tensor,
    window: int,
    page_size: int,
    *,
    starts: torch.Tensor,
    block_caps: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Where the views of R rows begin, see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    rows = len(slots)
    if rows:
        block = min(triton.next_power_of_2(rows), 128)
        _window_starts[(triton.cdiv(rows, block),)](
            slots, caps, seq_lens, lows, starts, block_caps, rows, window,
            PAGE_SIZE=page_size, BLOCK=block, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip


def window_layout(
    slots: torch.Tensor,
    starts: torch.Tensor,
    cu_q: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
    *,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
    places: torch.Tensor,
    pages: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Turn blocks into blocks over views, see the reference; outputs are contiguous.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    rows, view = pages.shape
    if rows:
        _window_layout[(rows,)](
            slots, starts, cu_q, positions, page_table, table, kv_slots, kv_lens, places, pages,
            rows, len(positions), page_table.shape[1], view, page_table.stride(0),
            PAGE_SIZE=page_size,
            NODES=_NODES,
            COLUMNS=min(triton.next_power_of_2(view), _COLUMNS),
            PADDING=_PADDING,
            PDL=pdl,
            num_warps=1 if view <= 128 else 4,
            launch_pdl=pdl,
        )  # fmt: skip


def draft_slots(
    kv_slots: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
    *,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """The draft's KV slots of the target's, see the reference; ``pdl``: as above."""
    tokens = len(kv_slots)
    if tokens:
        _draft_slots[(triton.cdiv(tokens, _BLOCK),)](
            kv_slots, table, out, tokens,
            PAGE_SIZE=page_size, BLOCK=_BLOCK, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
