"""A residual addition and the RMS norm of the sum in Triton: one program a row."""

import torch
import triton
import triton.language as tl

from .rms_norm_gpu import normed_row, row_warps


@triton.jit
def _add_rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    total_stride: tl.tensor,
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
    left = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
    right = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    both = (left.to(tl.float32) + right).to(residual.dtype.element_ty)
    tl.store(total + row * total_stride + column, both, mask=inside)
    value = normed_row(both.to(tl.float32), gain, eps, WIDTH, GEMMA, out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gemma: bool = False,
    total: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Add x [T, H] to ``residual`` [T, H] and return the sum's norm [T, H].

    All of one float dtype; the sum is rounded to it before it is normed, and written to ``total``
    [T, H], else in place. ``weight`` [H], ``gemma`` and ``pdl`` are those of
    `rms_norm_gpu.rms_norm`. Raises ValueError unless all three have contiguous rows as wide as the
    weight.
    """
    width = weight.shape[0]
    total = residual if total is None else total
    for tensor in (x, residual, total):
        if tensor.shape != (x.shape[0], width) or tensor.stride(1) != 1:
            raise ValueError(
                f"{tuple(tensor.shape)} is not {x.shape[0]} contiguous rows of {width}"
            )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(width)
    _add_rms_norm[(x.shape[0],)](
        x,
        residual,
        total,
        weight,
        out,
        eps,
        x.stride(0),
        residual.stride(0),
        total.stride(0),
        WIDTH=width,
        BLOCK=block,
        GEMMA=gemma,
        PDL=pdl,
        num_warps=row_warps(block),
        launch_pdl=pdl,
    )
    return out
