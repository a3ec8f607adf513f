"""A residual addition and the RMS norm of the sum in Triton: one program a row."""

import torch
import triton
import triton.language as tl

from .rms_norm_gpu import normed_row, row_warps


@triton.jit
def _add_rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GEMMA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    stream = residual + row * residual_stride + column
    left = tl.load(stream, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = (left + right).to(residual.dtype.element_ty)
    tl.store(stream, total, mask=inside)
    value = normed_row(total.to(tl.float32), gain, eps, WIDTH, GEMMA, out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gemma: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """Add x [T, H] to ``residual`` [T, H] in place and return the sum's norm [T, H].

    All of one float dtype; the sum is rounded to it before it is normed. ``weight`` [H],
    ``gemma`` and ``pdl`` are those of `rms_norm_gpu.rms_norm`. Raises ValueError unless both have
    contiguous rows as wide as the weight.
    """
    width = weight.shape[0]
    for tensor in (x, residual):
        if tensor.shape != (x.shape[0], width) or tensor.stride(1) != 1:
            raise ValueError(
                f"{tuple(tensor.shape)} is not {x.shape[0]} contiguous rows of {width}"
            )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(width)
    _add_rms_norm[(x.shape[0],)](
        x,
        residual,
        weight,
        out,
        eps,
        x.stride(0),
        residual.stride(0),
        WIDTH=width,
        BLOCK=block,
        GEMMA=gemma,
        PDL=pdl,
        num_warps=row_warps(block),
        launch_pdl=pdl,
    )
    return out
