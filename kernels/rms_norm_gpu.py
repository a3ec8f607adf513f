"""RMS normalisation in Triton: one program a row."""

import torch
import triton
import triton.language as tl


def row_warps(block: int) -> int:
    """Warps for a row of ``block`` elements: eight a thread, one 16-byte load in 16 bits."""
    return min(max(block // 256, 1), 16)


@triton.jit
def normed_row(
    wide: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    GEMMA: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """float32 norm of a float32 row (zero beyond WIDTH) times its weights; see `rms_norm`."""
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    gain = weight.to(tl.float32)
    if GEMMA:
        gain += 1.0
    else:
        normed = normed.to(DTYPE).to(tl.float32)
    return normed * gain


@triton.jit
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GAINS: tl.constexpr,
    GEMMA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + row % GAINS * WIDTH + column, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = normed_row(wide, gain, eps, WIDTH, GEMMA, out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, gemma: bool = False, pdl: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in float32.

    ``x`` [..., H] and ``weight`` [H], or x [..., A, H] and weight [A, H], of one float dtype,
    rounded as in `rms_norm.rms_norm`. ``gemma``: multiply by 1 + weight. ``pdl``: programmatic
    dependent launch (Hopper and later); the weight, which must be constant, is then read before the
    previous kernel ends. Raises ValueError unless the rows are contiguous and as wide as the
    weight.
    """
    width = weight.shape[-1]
    if x.shape[-weight.dim() :] != weight.shape or x.stride(-1) != 1:
        raise ValueError(f"rows {tuple(x.shape)} are not contiguous rows of {tuple(weight.shape)}")
    if not weight.is_contiguous():
        raise ValueError("the weight is not contiguous")
    rows = x.reshape(-1, width)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows.shape[0],)](
        rows,
        weight,
        out,
        eps,
        rows.stride(0),
        WIDTH=width,
        BLOCK=block,
        GAINS=weight.numel() // width,
        GEMMA=gemma,
        PDL=pdl,
        num_warps=row_warps(block),
        launch_pdl=pdl,
    )
    return out.view(x.shape)
