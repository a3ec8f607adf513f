"""The gated activations of SwiGLU and GeGLU in Triton, float32 inside."""

import torch
import triton
import triton.language as tl

# Up to so many rows a program takes a small block, to spread them over the processors.
_FEW_ROWS = 64


@triton.jit
def _gated(
    gate_up: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = gate_up + row * stride + column
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        # (1 + tanh(y)) / 2 is sigmoid(2 y): no cancellation for y far below 0
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(slope))
    sigmoid = tl.where(slope < 0, small, 1.0) / (1.0 + small)
    value = gate * sigmoid * up
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def _launch(gate_up: torch.Tensor, gelu: bool, pdl: bool) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"{tuple(gate_up.shape)} is not contiguous rows of two equal halves")
    out = gate_up.new_empty(rows, width)
    block = min(512 if rows <= _FEW_ROWS else 2048, triton.next_power_of_2(width))
    _gated[(rows, triton.cdiv(width, block))](
        gate_up,
        out,
        gate_up.stride(0),
        WIDTH=width,
        BLOCK=block,
        GELU=gelu,
        PDL=pdl,
        num_warps=max(block // 256, 1),
        launch_pdl=pdl,
    )
    return out


def silu_mul(gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """silu(gate) * up [T, I] of gate_up [T, 2 I], rounded once.

    ``pdl``: programmatic dependent launch (Hopper and later). Raises ValueError unless the rows
    are contiguous and of even width.
    """
    return _launch(gate_up, False, pdl)


def gelu_tanh_mul(gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """gelu(gate) * up in the tanh approximation; all else as in `silu_mul`."""
    return _launch(gate_up, True, pdl)
