"""Where the tokens of draft passes stand, and where their KV goes, in Triton."""

import torch
import triton
import triton.language as tl

_BLOCK = 128


@triton.jit
def _lay_out(
    slots: tl.tensor,
    caps: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    kv_lens: tl.tensor,
    rows: tl.tensor,
    each: tl.tensor,
    level_width: tl.tensor,
    ahead: tl.tensor,
    columns: tl.tensor,
    table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Token ``lane`` of rows * each: of a chain, pass by pass; of a tree, row by row."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < rows * each
    row = lane % rows if CHAIN else lane // each
    node = lane // rows if CHAIN else lane % each
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    drafts = tl.load(caps + row, mask=inside, other=0) > 0
    start = tl.load(seq_lens + slot, mask=inside & drafts, other=0) + ahead
    index = tl.where(drafts, start + node, 0)
    column = index // PAGE_SIZE
    page = tl.load(
        page_table + slot * table_stride + column,
        mask=inside & drafts & (column < columns),
        other=0,
    )
    kv_slot = page.to(tl.int64) * PAGE_SIZE + tl.where(drafts, index % PAGE_SIZE, 0)
    tl.store(kv_slots + lane, kv_slot, mask=inside)
    if CHAIN:
        tl.store(positions + lane, index.to(tl.int64), mask=inside)
        tl.store(kv_lens + lane, index + 1, mask=inside)
    else:
        position = tl.where(drafts, start + node // level_width, 0)
        tl.store(positions + lane, position.to(tl.int64), mask=inside)
        length = tl.where(drafts, start, 0) + each
        tl.store(kv_lens + row, length, mask=inside & (node == 0))


def chain_layout(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    *,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Lay out N passes over R rows of one token each, see the reference; outputs are contiguous.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    passes, rows = positions.shape
    _launch(
        slots, caps, seq_lens, page_table, page_size, positions, kv_slots, kv_lens, rows, passes,
        1, 0, True, pdl,
    )  # fmt: skip


def tree_layout(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    width: int,
    ahead: int,
    *,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Lay out one pass over R rows of C tree nodes each, see the reference and ``chain_layout``."""
    rows, nodes = positions.shape
    _launch(
        slots, caps, seq_lens, page_table, page_size, positions, kv_slots, kv_lens, rows, nodes,
        width, ahead, False, pdl,
    )  # fmt: skip


def _launch(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
    rows: int,
    each: int,
    width: int,
    ahead: int,
    chain: bool,
    pdl: bool,
) -> None:
    if rows * each == 0:
        return
    _lay_out[(triton.cdiv(rows * each, _BLOCK),)](
        slots,
        caps,
        seq_lens,
        page_table,
        positions,
        kv_slots,
        kv_lens,
        rows,
        each,
        width,
        ahead,
        page_table.shape[1],
        page_table.stride(0),
        PAGE_SIZE=page_size,
        CHAIN=chain,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
