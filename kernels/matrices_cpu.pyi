"""Packed weights, and what is done with one matrix or norm alone; see native_cpu.pyi."""

from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from .native_cpu import _InstructionSet

_Weights: TypeAlias = NDArray[np.uint16] | NDArray[np.float32]

__pyx_capi__: dict[str, object]  # what other compiled modules call

@final
class Arena:
    """One block of ``num_bytes``, on huge pages where possible, from which matrices are cut."""

    def __init__(self, num_bytes: int) -> None: ...

@final
class PackedMatrix:
    """A weight [outputs, inputs], copied into the layout of the matmul kernel.

    ``bias`` is float32[outputs]. ``pairs``: the rows are two halves (gate and up) that a gated
    activation will multiply. Memory comes from ``arena`` while it lasts, else from the heap.
    ``int8``: weights are rounded to integers of up to 127, times a scale of each output.
    """

    def __init__(
        self,
        weight: _Weights,
        bias: NDArray[np.float32] | None = None,
        *,
        pairs: bool = False,
        arena: Arena | None = None,
        int8: bool = False,
    ) -> None: ...
    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""

def linear(
    x: NDArray[np.float32],
    matrix: PackedMatrix,
    out: NDArray[np.float32],
    *,
    isa: _InstructionSet | None = None,
) -> None:
    """Write out [M, outputs] = x [M, inputs] W^T + bias."""

def rms_norm(
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float,
    out: NDArray[np.float32],
    *,
    isa: _InstructionSet | None = None,
) -> None:
    """Write out [M, size] = x / sqrt(mean(x^2) + eps) * weight, row by row."""

def rms_norm_chunks(
    x: NDArray[np.float32],
    weights: NDArray[np.float32],
    eps: float,
    out: NDArray[np.float32],
    *,
    isa: _InstructionSet | None = None,
) -> None:
    """As rms_norm of each of C chunks of x [M, C * size] with its row of ``weights`` [C, size]."""
