"""Native float32 kernels on a CPU: the instruction sets, and the rates of this machine.

Weights are float32, or bfloat16 given as the uint16 bit patterns and widened exactly in
registers: the mathematics is float32 throughout. All arrays are C-contiguous. A token's results
are bit-identical in every batch (docs/decisions/0003-cpu-kernels.md). Calls release the GIL.
``isa`` None takes the best of ``instruction_sets()``. AVX2 and AVX-512 give the same bits; the base
instruction set may differ from them in the last ones, since it does not fuse multiply and add.
"""

from typing import Literal, TypeAlias

_InstructionSet: TypeAlias = Literal["avx512", "avx2", "base"]

__pyx_capi__: dict[str, object]  # what other compiled modules call

def instruction_sets() -> tuple[_InstructionSet, ...]:
    """The instruction sets whose code can run here, the best first."""

def measure_multiply_add_rate() -> float:
    """Operations per second of this core, measured now (two for each lane of a multiply-add)."""

def measure_stream_bandwidth(num_bytes: int) -> float:
    """Bytes per second of the second pass over a block of ``num_bytes``, measured now."""
