"""What an EAGLE draft takes in, in one Triton launch: one program a half of a row."""

import torch
import triton
import triton.language as tl

from .rms_norm_gpu import normed_row, row_warps


@triton.jit
def _half(
    source: tl.tensor,
    norm: tl.tensor,
    target: tl.tensor,
    eps: tl.tensor,
    ids: tl.tensor,
    token: tl.tensor,
    known: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Row ``token`` of ``source``, or the one that ``ids`` names there, normed by ``norm``."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = 1.0
    if norm is not None:
        gain = tl.load(norm + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = token
    if ids is not None:
        row = tl.load(ids + token).to(tl.int64)
        row = tl.where((row >= 0) & (row < known), row, 0)
    value = tl.load(source + row * stride + column, mask=inside, other=0.0)
    if norm is not None:
        wide = value.to(tl.float32)
        value = normed_row(wide, gain, eps, WIDTH, False, target.dtype.element_ty)
    tl.store(target + column, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _draft_input(
    ids: tl.tensor,
    table: tl.tensor,
    hidden: tl.tensor,
    embed_norm: tl.tensor,
    hidden_norm: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    vocab: tl.tensor,
    table_stride: tl.tensor,
    hidden_stride: tl.tensor,
    EMBED: tl.constexpr,
    EMBED_BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    row = out + token * (EMBED + HIDDEN)
    # Halves have code of their own, whose sizes may differ: names of a branch stay inside it.
    if tl.program_id(1) == 0:
        _half(
            table, embed_norm, row, eps, ids, token, vocab, table_stride, EMBED, EMBED_BLOCK, PDL
        )  # fmt: skip
    else:
        _half(
            hidden, hidden_norm, row + EMBED, eps, None, token, 0, hidden_stride, HIDDEN,
            HIDDEN_BLOCK, PDL,
        )  # fmt: skip


def draft_input(
    ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    embed_norm: torch.Tensor | None,
    hidden_norm: torch.Tensor | None,
    eps: float,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """[T, E + H]: embeddings beside hidden states, each normed where it has a weight.

    See the reference; roundings are those of `rms_norm_gpu.rms_norm`. ``pdl``: programmatic
    dependent launch (Hopper and later). Raises ValueError unless table and hidden have contiguous
    rows of one dtype, the ids are contiguous, and the weights are as wide as their half.
    """
    (vocab, embed_width), (tokens, hidden_width) = table.shape, hidden.shape
    if vocab < 1 or ids.shape != (tokens,) or not ids.is_contiguous():
        raise ValueError(
            f"{tuple(ids.shape)} ids of a table {tuple(table.shape)} for {tokens} rows"
        )
    if table.stride(1) != 1 or hidden.stride(1) != 1 or table.dtype != hidden.dtype:
        raise ValueError("table and hidden are not contiguous rows of one dtype")
    for weight, width in ((embed_norm, embed_width), (hidden_norm, hidden_width)):
        if weight is not None and weight.shape != (width,):
            raise ValueError(f"norm of {tuple(weight.shape)} for rows of {width}")
    out = hidden.new_empty(tokens, embed_width + hidden_width)
    blocks = triton.next_power_of_2(embed_width), triton.next_power_of_2(hidden_width)
    if tokens:
        _draft_input[(tokens, 2)](
            ids,
            table,
            hidden,
            embed_norm,
            hidden_norm,
            out,
            eps,
            vocab,
            table.stride(0),
            hidden.stride(0),
            EMBED=embed_width,
            EMBED_BLOCK=blocks[0],
            HIDDEN=hidden_width,
            HIDDEN_BLOCK=blocks[1],
            PDL=pdl,
            num_warps=row_warps(max(blocks)),
            launch_pdl=pdl,
        )
    return out
