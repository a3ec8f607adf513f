"""The linear layers of a decoder on a GPU: cuBLAS, or a kernel for few rows and its epilogues."""

# mypy: disable-error-code="no-untyped-call"

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .linear_config import SkinnyConfig
from .skinny_linear_gpu import silu, skinny_linear
from .split_workspace import SplitWorkspace
from .stream_config import StreamConfig
from .stream_linear_gpu import stream_linear

INTERLEAVE = 8  # gate rows, then up rows: both fall to the same thread of a tensor core's tile

LinearConfig = SkinnyConfig | StreamConfig


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    config: LinearConfig,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_block: int = 0,
    out: torch.Tensor | None = None,
    workspace: SplitWorkspace | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The kernel that ``config`` is for; see `skinny_linear_gpu.skinny_linear`."""
    if isinstance(config, StreamConfig):
        return stream_linear(
            x, weight, config=config, bias=bias, residual=residual, silu_block=silu_block,
            out=out, workspace=workspace, pdl=pdl,
        )  # fmt: skip
    return skinny_linear(
        x, weight, config=config, bias=bias, residual=residual, silu_block=silu_block, out=out,
        workspace=workspace, pdl=pdl,
    )  # fmt: skip


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    config: LinearConfig | None = None,
    out: torch.Tensor | None = None,
    workspace: SplitWorkspace | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """As ``linear.linear``, into ``out`` [M, N], whose rows may be strided, if that is given.

    cuBLAS without a ``config``, else the kernel that it is for.
    """
    if config is not None:
        return few_rows_linear(
            x, weight, config=config, bias=bias, residual=residual, out=out, workspace=workspace,
            pdl=pdl,
        )  # fmt: skip
    if residual is not None and bias is None:
        return torch.addmm(residual, x, weight.t(), out=out)
    product = F.linear(x, weight, bias)
    if residual is not None:
        return torch.add(product, residual, out=product if out is None else out)
    return product if out is None else out.copy_(product)


def linear_silu_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block: int,
    config: LinearConfig | None = None,
    workspace: SplitWorkspace | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """As ``linear.linear_silu_mul``: fused with a ``config``, else cuBLAS and a second kernel."""
    if config is None:
        return silu_mul_interleaved(F.linear(x, weight, bias), block, pdl=pdl)
    return few_rows_linear(
        x, weight, config=config, bias=bias, silu_block=block, workspace=workspace, pdl=pdl
    )


@triton.jit
def _silu_mul(  # type: ignore[no-untyped-def]
    gate_up, out, width, stride, PAIR: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at = gate_up + row * stride + column // PAIR * (2 * PAIR) + column % PAIR
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + PAIR, mask=mask, other=0.0).to(tl.float32)
    value = silu(gate) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


def silu_mul_interleaved(gate_up: torch.Tensor, block: int, *, pdl: bool = False) -> torch.Tensor:
    """As ``linear.silu_mul_interleaved``, in float32 and rounded once: [M, N] to [M, N / 2]."""
    rows, columns = gate_up.shape
    width = columns // 2
    out = gate_up.new_empty(rows, width)
    if rows == 0 or width == 0:
        return out
    size = min(1024, triton.next_power_of_2(width))
    pdl = pdl and gate_up.is_cuda
    launch = {"launch_pdl": True} if pdl else {}
    _silu_mul[(rows, triton.cdiv(width, size))](
        gate_up, out, width, gate_up.stride(0), PAIR=block, BLOCK=size, PDL=pdl, **launch
    )
    return out
