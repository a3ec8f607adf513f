"""What an EAGLE draft takes in, in one Triton launch: one program a half of a row."""

import torch
import triton
import triton.language as tl

from .rms_norm_gpu import normed_row, row_warps


@triton.jit
def _half(
    source: tl.tensor,
    gain: tl.tensor,
    target: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
) -> None:
    """Write a row of WIDTH elements, normed with its weights if NORMED."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(source + column, mask=inside, other=0.0)
    if NORMED:
        wide = value.to(tl.float32)
        normed = normed_row(wide, gain, eps, WIDTH, False, target.dtype.element_ty)
        value = normed.to(target.dtype.element_ty)
    tl.store(target + column, value, mask=inside)


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
    if tl.program_id(1) == 0:
        column = tl.arange(0, EMBED_BLOCK)
        gain = 1.0
        if embed_norm is not None:
            gain = tl.load(embed_norm + column, mask=column < EMBED, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        given = tl.load(ids + token).to(tl.int64)
        given = tl.where((given >= 0) & (given < vocab), given, 0)
        source = table + given * table_stride
        _half(source, gain, row, eps, EMBED, EMBED_BLOCK, embed_norm is not None)
    else:
        column = tl.arange(0, HIDDEN_BLOCK)
        gain = 1.0
        if hidden_norm is not None:
            gain = tl.load(hidden_norm + column, mask=column < HIDDEN, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        source = hidden + token * hidden_stride
        _half(source, gain, row + EMBED, eps, HIDDEN, HIDDEN_BLOCK, hidden_norm is not None)


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
