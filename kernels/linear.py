"""The matmul of a linear layer with its epilogues, the torch reference."""

import torch
import torch.nn.functional as F


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N], all of one float dtype."""
    out = F.linear(x, weight, bias)
    return out if residual is None else out + residual


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, block: int
) -> torch.Tensor:
    """silu(gate) * up [M, N / 2] of ``weight`` [N, K] interleaved by ``interleave_gate_up``."""
    return silu_mul_interleaved(F.linear(x, weight, bias), block)


def interleave_gate_up(gate_up: torch.Tensor, block: int) -> torch.Tensor:
    """Reorder the rows [gate; up] into ``block`` gate rows, their ``block`` up rows, and so on.

    ``gate_up``: [N, ...], a weight or a bias, gate in the first N / 2 rows. A gate row and its up
    row then meet in one tile of a matmul. Raises ValueError unless 2 * block divides N.
    """
    rows = gate_up.shape[0]
    if block < 1 or rows % (2 * block):
        raise ValueError(f"{rows} rows cannot be interleaved in blocks of {block}")
    blocks = gate_up.reshape(2, rows // (2 * block), block, -1)
    return blocks.transpose(0, 1).reshape(gate_up.shape)


def silu_mul_interleaved(gate_up: torch.Tensor, block: int) -> torch.Tensor:
    """silu(gate) * up [M, N / 2] of [M, N] whose columns are interleaved in blocks."""
    rows, columns = gate_up.shape
    gate, up = gate_up.reshape(rows, columns // (2 * block), 2, block).unbind(2)
    return (F.silu(gate) * up).reshape(rows, columns // 2)
