"""What the matmul kernels ask of their operands, and where their results go."""

import torch

from .split_workspace import SplitConfig, SplitWorkspace

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_operands(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    silu_block: int,
    block_n: int,
    tma: bool,
) -> None:
    """Raise ValueError on shapes, dtypes or strides that a matmul kernel cannot take.

    ``block_n``: weight rows of a tile. ``tma``: rows are loaded through tensor descriptors.
    """
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
        or block_n % (2 * silu_block)
        or n % (2 * silu_block)
    ):
        raise ValueError(
            f"silu_block {silu_block} takes no residual and divides block_n / 2 and {n} / 2"
        )
    if tma and k * x.element_size() % 16:
        raise ValueError(f"tma needs rows of a multiple of 16 bytes, not {k} {x.dtype}")


def result(
    x: torch.Tensor, weight: torch.Tensor, silu_block: int, out: torch.Tensor | None
) -> torch.Tensor:
    """``out`` or a new [M, N], [M, N / 2] with ``silu_block``. ValueError if ``out`` is not so."""
    rows, width = x.shape[0], weight.shape[0] // (2 if silu_block else 1)
    if out is None:
        return x.new_empty(rows, width)
    if out.shape != (rows, width) or out.dtype != x.dtype or (width > 1 and out.stride(1) != 1):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, needs ({rows}, {width})")
    return out


def scratch(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: SplitConfig,
    workspace: SplitWorkspace | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Partial sums and arrival counters, Nones without a split. ValueError if they do not fit."""
    n, k = weight.shape
    need = SplitWorkspace.need(x.shape[0], n, k, config)
    found = SplitWorkspace.of(workspace, x.device, need)
    return (None, None) if found is None else (found.partial, found.arrived)
