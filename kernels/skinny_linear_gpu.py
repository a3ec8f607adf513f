"""Linear layers of few rows: Triton kernels that stream the weight once at memory speed.

The weight's rows are the M side of the tensor core's tile and the input's rows the N side
(out^T = weight x^T), so that a few rows cost no padding of the large operand. A program adds up
its part of K in a fixed order, and the parts are added in order by whichever program arrives last:
the same inputs give the same bits, and with one configuration a row's bits depend neither on the
other rows nor on how many of them share its tile.
"""

# mypy: disable-error-code="no-untyped-call"

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from .linear_config import SkinnyConfig, row_tier
from .linear_operands import check_operands, result, scratch
from .split_workspace import SplitWorkspace


@triton.jit
def silu(gate):  # type: ignore[no-untyped-def]
    """gate * sigmoid(gate), without an exponential that can overflow."""
    small = tl.exp(-tl.abs(gate))
    return gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    acc, bias, residual, out, n, m, N, rows, stride_r, stride_o,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add the bias, gate or add the residual in float32, round once and store acc [n, m]^T."""
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if PAIR > 0:
        blocks = tl.reshape(acc, [BLOCK_N // (2 * PAIR), 2, PAIR, BLOCK_M])
        gate, up = tl.split(tl.permute(blocks, (0, 2, 3, 1)))
        half: tl.constexpr = BLOCK_N // 2
        gate = tl.reshape(gate, [half, BLOCK_M])
        up = tl.reshape(up, [half, BLOCK_M])
        acc = silu(gate) * up
        n = tl.program_id(0) * half + tl.arange(0, half)
        N = N // 2
    mask = (n < N)[:, None] & (m < rows)[None, :]
    if HAS_RESIDUAL:
        at = residual + m.to(tl.int64)[None, :] * stride_r + n[:, None]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = out + m.to(tl.int64)[None, :] * stride_o + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "steps"])
def _skinny(  # type: ignore[no-untyped-def]
    x, weight, x_desc, weight_desc, bias, residual, out, partial, arrived,
    rows, N, K, steps, stride_x, stride_w, stride_r, stride_o,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAIR: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_K)
    first = part * steps * BLOCK_K
    last = tl.minimum(K, first + steps * BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    w_rows = weight + n.to(tl.int64)[:, None] * stride_w
    x_rows = x + m.to(tl.int64)[None, :] * stride_x
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for k in range(first, last, BLOCK_K):
        if TMA:
            w_tile = weight_desc.load([tile * BLOCK_N, k])
            x_tile = x_desc.load([0, k]).T
        else:
            at = k + lanes
            if EVEN_K and EVEN_N:
                w_tile = tl.load(w_rows + at[None, :], eviction_policy="evict_first")
            else:
                w_mask = (n < N)[:, None] & (at < K)[None, :]
                w_tile = tl.load(
                    w_rows + at[None, :], mask=w_mask, other=0.0, eviction_policy="evict_first"
                )
            x_mask = (m < rows)[None, :] & (at < K)[:, None]
            if EVEN_K:
                x_mask = (m < rows)[None, :]
            x_tile = tl.load(
                x_rows + at[:, None], mask=x_mask, other=0.0, eviction_policy="evict_last"
            )
        if UPCAST:
            w_tile = w_tile.to(tl.float32)
            x_tile = x_tile.to(tl.float32)
        acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
    if SPLIT:
        parts = tl.num_programs(1)
        tiles = tl.num_programs(0)
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        mine = partial + (part * tiles + tile).to(tl.int64) * (BLOCK_N * BLOCK_M)
        tl.store(mine + inside, acc)
        # Every thread's stores come before the one thread's release.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == parts - 1:
            acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for other in range(parts):
                there = partial + (other * tiles + tile).to(tl.int64) * (BLOCK_N * BLOCK_M)
                # Past L1, which may hold what an earlier kernel left at these addresses.
                acc += tl.load(there + inside, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
            _store(
                acc, bias, residual, out, n, m, N, rows, stride_r, stride_o,
                BLOCK_M, BLOCK_N, PAIR, HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip
    else:
        _store(
            acc, bias, residual, out, n, m, N, rows, stride_r, stride_o,
            BLOCK_M, BLOCK_N, PAIR, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    config: SkinnyConfig,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_block: int = 0,
    out: torch.Tensor | None = None,
    workspace: SplitWorkspace | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K]^T with a fused epilogue: [M, N], M at most 128.

    ``bias`` [N] and ``residual`` [M, N] are added in float32 before the one rounding. With
    ``silu_block`` the weight is interleaved in blocks of it (``interleave_gate_up``) and the
    result is silu(gate) * up [M, N / 2]. Rows may be strided, columns are contiguous.
    ``pdl`` launches the kernel while the one before it still runs: every kernel of that chain has
    to wait for its predecessor (``gdc_wait``) before it ends. ``workspace`` is None or large
    enough for split_k. Raises ValueError on shapes, dtypes or strides that do not fit.
    """
    rows, k = x.shape
    n = weight.shape[0]
    check_operands(x, weight, bias, residual, silu_block, config.block_n, config.tma)
    out = result(x, weight, silu_block, out)
    if rows == 0 or n == 0:
        return out
    block_m = row_tier(rows)
    tiles = triton.cdiv(n, config.block_n)
    depth = triton.cdiv(k, config.block_k)
    steps = max(1, triton.cdiv(depth, config.split_k))
    parts = max(1, triton.cdiv(depth, steps))
    partial, arrived = scratch(x, weight, config, workspace)
    on_gpu = x.is_cuda
    # Only the driver knows launch_pdl; the interpreter would take it for a parameter.
    launch = {"launch_pdl": True} if pdl and on_gpu else {}
    _skinny[(tiles, parts)](
        x,
        weight,
        _descriptor(x, block_m, config.block_k) if config.tma else x,
        _descriptor(weight, config.block_n, config.block_k) if config.tma else weight,
        bias,
        residual,
        out,
        partial,
        arrived,
        rows,
        n,
        k,
        steps,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PAIR=silu_block,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        EVEN_N=config.tma or n % config.block_n == 0,
        EVEN_K=config.tma or k % config.block_k == 0,
        SPLIT=parts > 1,
        TMA=config.tma,
        PDL=pdl and on_gpu,
        UPCAST=not on_gpu and x.dtype == torch.bfloat16,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch,
    )
    return out


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])
