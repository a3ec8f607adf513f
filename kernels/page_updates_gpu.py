"""Changes to the page table on a GPU: room for U of them, of which the device counts the real."""

import torch
import triton
import triton.language as tl

_BLOCK = 128


def apply_page_updates(
    page_table: torch.Tensor,
    slots: torch.Tensor,
    columns: torch.Tensor,
    pages: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Set page_table[slots[i], columns[i]] = pages[i] for i < count[0], see the reference."""
    room = slots.shape[0]
    if room:
        _apply_kernel[(triton.cdiv(room, _BLOCK),)](
            page_table, slots, columns, pages, count, page_table.stride(0), BLOCK=_BLOCK
        )


@triton.jit
def _apply_kernel(
    page_table: tl.tensor,
    slots: tl.tensor,
    columns: tl.tensor,
    pages: tl.tensor,
    count: tl.tensor,
    table_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    update = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = update < tl.load(count)
    slot = tl.load(slots + update, mask=used, other=0).to(tl.int64)
    column = tl.load(columns + update, mask=used, other=0)
    page = tl.load(pages + update, mask=used, other=0)
    tl.store(page_table + slot * table_stride + column, page, mask=used)
