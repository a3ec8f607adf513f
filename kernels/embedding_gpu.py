"""Rows of the embedding table in Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def _embed(
    ids: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(ids + token).to(tl.int64)
    row = tl.where((row >= 0) & (row < vocab), row, 0)
    value = tl.load(table + row * stride + column, mask=inside)
    tl.store(out + token * out_stride + column, value, mask=inside)


def embed(
    ids: torch.Tensor, table: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """[T, H]: row ids[t] of ``table`` [V, H], in ``out`` if that is given.

    An id of int64[T] outside 0..V-1, which is padding, reads row 0 instead of faulting. ``pdl``:
    programmatic dependent launch (Hopper and later). Raises ValueError unless the table
    and ``out`` have contiguous rows, the table at least one, and the ids are contiguous.
    """
    vocab, width = table.shape
    if vocab < 1 or table.stride(1) != 1 or not ids.is_contiguous():
        raise ValueError(f"no contiguous ids and rows in table {tuple(table.shape)}")
    if out is None:
        out = table.new_empty(ids.shape[0], width)
    if out.shape != (ids.shape[0], width) or out.stride(1) != 1 or out.dtype != table.dtype:
        raise ValueError(f"out {tuple(out.shape)} is not {ids.shape[0]} contiguous rows of {width}")
    block = min(triton.next_power_of_2(width), 4096)
    _embed[(ids.shape[0], triton.cdiv(width, block))](
        ids,
        table,
        out,
        vocab,
        table.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(block // 256, 1),
        launch_pdl=pdl,
    )
    return out
