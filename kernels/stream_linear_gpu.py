"""Linear layers of few rows on Hopper: the next weights are on their way before the last are done.

As `skinny_linear_gpu`, but with explicit asynchronous copies (Gluon, Triton's lower level). A
program asks for as much of the weight as its shared memory holds before it waits for the kernel
that makes its input, so memory stays busy across launches; only then it loads x. Tiles of the
weight are the M side of the tensor core's tile (wgmma), the input's rows the N side. Gluon has no
interpreter: the kernel's tests need a GPU, `skinny_linear_gpu` is its twin for other devices.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, assignment, misc, attr-defined"

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .linear_config import row_tier
from .linear_operands import check_operands, result, scratch
from .split_workspace import SplitWorkspace
from .stream_config import WEIGHT_ROWS, StreamConfig

_ROWS = gl.constexpr(WEIGHT_ROWS)
_PAIR = 8  # a thread of a tensor core's tile holds rows that are 8 apart
_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _silu(gate):
    """gate * sigmoid(gate), without an exponential that can overflow."""
    small = gl.exp(-gl.abs(gate))
    return gate * gl.where(gate >= 0, 1.0, small) / (1.0 + small)


@gluon.jit
def _store(
    acc, block, bias, residual, out, rows, N, stride_r, stride_o,
    BLOCK_M: gl.constexpr, PAIR: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Add the bias, gate or add the residual in float32, round once and store acc [64, M]^T."""
    WIDTH: gl.constexpr = _ROWS if PAIR == 0 else _ROWS // 2
    COALESCED: gl.constexpr = gl.BlockedLayout(
        [8, 1], [WIDTH // 8, 256 // WIDTH], [1, WARPS], [0, 1]
    )
    if bias is not None:
        n = block * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    if PAIR > 0:
        blocks = gl.reshape(acc, [_ROWS // (2 * PAIR), 2, PAIR, BLOCK_M])
        gate, up = gl.split(gl.permute(blocks, (0, 2, 3, 1)))
        acc = gl.reshape(_silu(gate) * up, [WIDTH, BLOCK_M])
        N = N // 2
    acc = gl.convert_layout(acc, COALESCED)
    n = block * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, COALESCED))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, COALESCED))
    mask = (n < N)[:, None] & (m < rows)[None, :]
    if residual is not None:
        at = residual + m.to(gl.int64)[None, :] * stride_r + n[:, None]
        acc += gl.load(at, mask=mask, other=0.0).to(gl.float32)
    at = out + m.to(gl.int64)[None, :] * stride_o + n[:, None]
    gl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _fetch(
    weight, ring, bar, stage, tile, k, some,
    TILES: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Load block ``k`` of a tile's rows into a stage of the ring, if ``some``."""
    for j in gl.static_range(TILES):
        tma.async_copy_global_to_shared(
            weight,
            [(tile * TILES + j) * _ROWS, k * BLOCK_K],
            bar,
            ring.index(stage * TILES + j),
            pred=some,
        )


@gluon.jit
def _settled(accs, TILES: gl.constexpr):
    """The accumulators once every product has been added."""
    if TILES == 1:
        return (warpgroup_mma_wait(0, deps=accs),)
    else:  # noqa: RET505
        return warpgroup_mma_wait(0, deps=accs)


@gluon.jit(do_not_specialize=["rows", "units", "depth", "per"])
def _stream(
    x, weight, bias, residual, out, partial, arrived,
    rows, N, units, depth, per, stride_r, stride_o,
    BLOCK_M: gl.constexpr, TILES: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    PAIR: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Units [program * per, + per) of ``units``; unit u is block u % depth of tile u // depth."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, BLOCK_M * 4 // WARPS, 16]
    )
    BYTES: gl.constexpr = (_ROWS * TILES + BLOCK_M) * BLOCK_K * 2
    SIZE: gl.constexpr = _ROWS * BLOCK_M
    ring = gl.allocate_shared_memory(weight.dtype, [STAGES * TILES, _ROWS, BLOCK_K], weight.layout)
    x_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    program = gl.program_id(0)
    begin = program * per
    end = gl.minimum(units, begin + per)
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    # The weight is nobody's output: it comes while the kernel that makes x still runs.
    next_tile = begin // depth
    next_k = begin - next_tile * depth
    first_k = next_k
    for s in gl.static_range(STAGES):
        some = begin + s < end
        mbarrier.expect(bars.index(s), BYTES, pred=some)
        _fetch(weight, ring, bars.index(s), s, next_tile, next_k, some, TILES, BLOCK_K)
        next_k += 1
        if next_k == depth:
            next_k = 0
            next_tile += 1
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for s in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [0, first_k * BLOCK_K], bars.index(s), x_ring.index(s), pred=begin + s < end
        )
        first_k += 1
        if first_k == depth:
            first_k = 0
    unit = begin
    stage = 0
    phase = 0
    while unit < end:
        tile = unit // depth
        stop = gl.minimum((tile + 1) * depth, end)
        accs = ()
        for _j in gl.static_range(TILES):
            zero = gl.zeros([_ROWS, BLOCK_M], gl.float32, MMA)
            accs = accs + (warpgroup_mma_init(zero),)  # noqa: RUF005
        for current in range(unit, stop):
            mbarrier.wait(bars.index(stage), phase)
            x_tile = x_ring.index(stage).permute((1, 0))
            ready = _settled(accs, TILES)
            new = ()
            for j in gl.static_range(TILES):
                w_tile = ring.index(stage * TILES + j)
                product = warpgroup_mma(w_tile, x_tile, ready[j], is_async=True)
                new = new + (product,)  # noqa: RUF005
            accs = new
            # While that multiplies, the stage before it has been read: fill it again.
            some = (current > begin) & (current - 1 + STAGES < end)
            free = stage - 1
            if stage == 0:
                free = STAGES - 1
            mbarrier.expect(bars.index(free), BYTES, pred=some)
            _fetch(weight, ring, bars.index(free), free, next_tile, next_k, some, TILES, BLOCK_K)
            tma.async_copy_global_to_shared(
                x, [0, next_k * BLOCK_K], bars.index(free), x_ring.index(free), pred=some
            )
            if some:
                next_k += 1
                if next_k == depth:
                    next_k = 0
                    next_tile += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        sums = _settled(accs, TILES)
        if not SPLIT:  # noqa: SIM114
            for j in gl.static_range(TILES):
                _store(
                    sums[j], tile * TILES + j, bias, residual, out, rows, N, stride_r, stride_o,
                    BLOCK_M, PAIR, WARPS,
                )  # fmt: skip
        elif stop - unit == depth:
            for j in gl.static_range(TILES):
                _store(
                    sums[j], tile * TILES + j, bias, residual, out, rows, N, stride_r, stride_o,
                    BLOCK_M, PAIR, WARPS,
                )  # fmt: skip
        else:
            n = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA))
            m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA))
            inside = n[:, None] * BLOCK_M + m[None, :]
            # A program has parts of at most two tiles: of its first and of its last.
            first = tile * depth
            mine = 2 * program + (begin < first).to(gl.int32)
            for j in gl.static_range(TILES):
                gl.store(partial + (mine.to(gl.int64) * TILES + j) * SIZE + inside, sums[j])
            # Every thread's stores come before the one thread's release.
            gl.thread_barrier()
            count = stop - unit
            if gl.atomic_add(arrived + tile, count, sem="acq_rel", scope="gpu") + count == depth:
                for j in gl.static_range(TILES):
                    acc = gl.zeros([_ROWS, BLOCK_M], gl.float32, MMA)
                    for other in range(first // per, (first + depth - 1) // per + 1):
                        if other == program:
                            acc += sums[j]
                        else:
                            theirs = 2 * other + (other * per < first).to(gl.int32)
                            at = partial + (theirs.to(gl.int64) * TILES + j) * SIZE + inside
                            # Past L1, which may hold what an earlier kernel left there.
                            acc += gl.load(at, cache_modifier=".cg")
                    _store(
                        acc, tile * TILES + j, bias, residual, out, rows, N, stride_r, stride_o,
                        BLOCK_M, PAIR, WARPS,
                    )  # fmt: skip
                gl.store(arrived + tile, 0)
        unit = stop


def stream_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    config: StreamConfig,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_block: int = 0,
    out: torch.Tensor | None = None,
    workspace: SplitWorkspace | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """As `skinny_linear_gpu.skinny_linear`, for bfloat16 or float16 on compute capability 9.0.

    Rows of x and weight start at multiples of 16 bytes and ``silu_block`` is 8 or none. Raises
    ValueError where operands do not fit.
    """
    rows, k = x.shape
    n = weight.shape[0]
    check_operands(x, weight, bias, residual, silu_block, WEIGHT_ROWS, tma=True)
    if silu_block not in (0, _PAIR):
        raise ValueError(
            f"the Hopper kernel pairs gate and up in blocks of {_PAIR}, not {silu_block}"
        )
    if x.dtype not in _ELEMENTS:
        raise ValueError(f"the Hopper kernel takes bfloat16 and float16, not {x.dtype}")
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16:
            raise ValueError(f"rows of {name} do not start at multiples of 16 bytes")
    out = result(x, weight, silu_block, out)
    if rows == 0 or n == 0:
        return out
    block_m = row_tier(rows)
    depth, per, programs = config.dealt(n, k)
    partial, arrived = scratch(x, weight, config, workspace)
    _stream[(programs,)](
        _descriptor(x, block_m, config.block_k),
        _descriptor(weight, WEIGHT_ROWS, config.block_k),
        bias,
        residual,
        out,
        partial,
        arrived,
        rows,
        n,
        -(-n // (WEIGHT_ROWS * config.tiles)) * depth,
        depth,
        per,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        BLOCK_M=block_m,
        TILES=config.tiles,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        PAIR=silu_block,
        PDL=pdl,
        WARPS=config.warps,
        SPLIT=partial is not None,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[tensor.dtype])
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)
