"""Linear layers of few rows: Triton kernels that stream the weight once at memory speed.

The weight's rows are the M side of the tensor core's tile and the input's rows the N side
(out^T = weight x^T), so that a few rows cost no padding of the large operand. A program adds up
its part of K in a fixed order, and the parts are added in order by whichever program arrives last:
the same inputs give the same bits, and with one configuration a row's bits depend neither on the
other rows nor on how many of them share its tile.
"""

# mypy: disable-error-code="no-untyped-call"

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from .linear_config import SkinnyConfig, row_tier

INTERLEAVE = 8  # gate rows, then up rows: both fall to the same thread of a tensor core's tile
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _prefetch(  # type: ignore[no-untyped-def]
    weight, n, first, last, depth, stride, N, CHUNKS: tl.constexpr
):
    """Ask L2 for the first ``depth`` of the columns [first, last) of the rows ``n``.

    Each row is cut into ``CHUNKS`` requests, so that every thread makes one.
    """
    chunk = tl.cdiv(tl.cdiv(depth, CHUNKS), 16) * 16
    start = first + chunk * tl.arange(0, CHUNKS)[None, :]
    size = tl.minimum(chunk, last - start) * (weight.dtype.element_ty.primitive_bitwidth // 8)
    address = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride + start
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [address.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _silu(gate):  # type: ignore[no-untyped-def]
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
        acc = _silu(gate) * up
        n = tl.program_id(0) * half + tl.arange(0, half)
        N = N // 2
    mask = (n < N)[:, None] & (m < rows)[None, :]
    if HAS_RESIDUAL:
        at = residual + m.to(tl.int64)[None, :] * stride_r + n[:, None]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = out + m.to(tl.int64)[None, :] * stride_o + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "steps", "depth"])
def _skinny(  # type: ignore[no-untyped-def]
    x, weight, x_desc, weight_desc, bias, residual, out, partial, arrived,
    rows, N, K, steps, depth, stride_x, stride_w, stride_r, stride_o,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAIR: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
    CHUNKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_K)
    first = part * steps * BLOCK_K
    last = tl.minimum(K, first + steps * BLOCK_K)
    if PDL:
        # The weight is nobody's output: fetch it while the kernel that makes x still runs.
        if depth > 0:
            _prefetch(weight, n, first, last, depth, stride_w, N, CHUNKS)
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


class SplitWorkspace:
    """What the parts of a split K leave for each other: partial sums and arrival counters.

    Kernels of one stream may share it: each leaves the counters at zero. Allocate it before a CUDA
    graph is captured, with the most elements (split_k * N rounded up to block_n * row tier) and
    tiles (N / block_n) that a matmul needs.
    """

    def __init__(self, device: torch.device | str, elements: int, tiles: int) -> None:
        self.partial = torch.empty(elements, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

    @classmethod
    def need(cls, rows: int, n: int, config: SkinnyConfig) -> tuple[int, int]:
        """(elements, tiles) that one matmul uses, (0, 0) without a split."""
        tiles = triton.cdiv(n, config.block_n)
        if config.split_k == 1:
            return 0, 0
        return config.split_k * tiles * config.block_n * row_tier(rows), tiles


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
    width = n // 2 if silu_block else n
    _check(x, weight, bias, residual, silu_block, config)
    if out is None:
        out = x.new_empty(rows, width)
    if out.shape != (rows, width) or out.dtype != x.dtype or (width > 1 and out.stride(1) != 1):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, needs ({rows}, {width})")
    if rows == 0 or n == 0:
        return out
    block_m = row_tier(rows)
    tiles = triton.cdiv(n, config.block_n)
    depth = triton.cdiv(k, config.block_k)
    steps = max(1, triton.cdiv(depth, config.split_k))
    parts = max(1, triton.cdiv(depth, steps))
    if parts > 1 and workspace is None:
        workspace = SplitWorkspace(x.device, *SplitWorkspace.need(rows, n, config))
    if parts > 1:
        assert workspace is not None
        elements = parts * tiles * config.block_n * block_m
        if workspace.partial.numel() < elements or workspace.arrived.numel() < tiles:
            raise ValueError(f"the workspace is too small for {elements} sums in {tiles} tiles")
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
        workspace.partial if workspace is not None and parts > 1 else None,
        workspace.arrived if workspace is not None and parts > 1 else None,
        rows,
        n,
        k,
        steps,
        _prefetch_depth(weight, config),
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
        CHUNKS=max(1, 32 * config.warps // config.block_n),
        UPCAST=not on_gpu and x.dtype == torch.bfloat16,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch,
    )
    return out


def _prefetch_depth(weight: torch.Tensor, config: SkinnyConfig) -> int:
    """Elements of a row to prefetch: none unless every row starts at a multiple of 16 bytes."""
    size = weight.element_size()
    aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) * size % 16 == 0
    return config.prefetch * config.block_k if aligned and weight.shape[1] * size % 16 == 0 else 0


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    silu_block: int,
    config: SkinnyConfig,
) -> None:
    rows, k = x.shape
    n = weight.shape[0]
    if x.dtype not in _DTYPES or weight.dtype != x.dtype or weight.shape[1] != k:
        raise ValueError(f"x {x.dtype} [{rows}, {k}] and weight {weight.dtype} {weight.shape}")
    if k > 1 and not x.stride(1) == weight.stride(1) == 1:
        raise ValueError("x and weight need contiguous columns")
    if bias is not None and (
        bias.shape != (n,) or bias.dtype != x.dtype or not bias.is_contiguous()
    ):
        raise ValueError(f"bias {bias.dtype} {tuple(bias.shape)} for {n} outputs")
    if residual is not None and (
        residual.shape != (rows, n) or residual.dtype != x.dtype or residual.stride(1) != 1
    ):
        raise ValueError(f"residual {residual.dtype} {tuple(residual.shape)} for [{rows}, {n}]")
    if silu_block and (
        residual is not None
        or silu_block & (silu_block - 1)
        or config.block_n % (2 * silu_block)
        or n % (2 * silu_block)
    ):
        raise ValueError(
            f"silu_block {silu_block} takes no residual and divides block_n / 2 and {n} / 2"
        )
    if config.tma and k * x.element_size() % 16:
        raise ValueError(f"tma needs rows of a multiple of 16 bytes, not {k} {x.dtype}")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    config: SkinnyConfig | None = None,
    workspace: SplitWorkspace | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """As ``linear.linear``: cuBLAS without a ``config``, else the weight-streaming kernel."""
    if config is not None:
        return skinny_linear(
            x, weight, config=config, bias=bias, residual=residual, workspace=workspace, pdl=pdl
        )
    if residual is not None and bias is None:
        return torch.addmm(residual, x, weight.t())
    out = F.linear(x, weight, bias)
    return out if residual is None else out.add_(residual)


def linear_silu_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    block: int,
    config: SkinnyConfig | None = None,
    workspace: SplitWorkspace | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """As ``linear.linear_silu_mul``: fused with a ``config``, else cuBLAS and a second kernel."""
    if config is None:
        return silu_mul_interleaved(F.linear(x, weight, bias), block, pdl=pdl)
    return skinny_linear(
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
    value = _silu(gate) * up
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
