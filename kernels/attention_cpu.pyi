"""Attention of a ragged batch over paged KV; see native_cpu.pyi."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from .native_cpu import _InstructionSet

@final
class RaggedBatch:
    """The arrays of a batch, checked against the cache they address; made by compiled code."""

def paged_attention(
    query: NDArray[np.float32],
    key_cache: NDArray[np.float32],
    value_cache: NDArray[np.float32],
    positions: NDArray[np.int64],
    cu_q: NDArray[np.int32],
    kv_lens: NDArray[np.int32],
    page_table: NDArray[np.int32],
    tree_bits: NDArray[np.int64],
    is_tree: NDArray[np.uint8],
    page_size: int,
    scale: float,
    window: int,
    out: NDArray[np.float32],
    *,
    isa: _InstructionSet | None = None,
) -> None:
    """Write what kernels.paged_attention returns for the same arguments into ``out``.

    head_dim must be a multiple of 8. Positions must be those of the layout: kv_len - q_len + i
    for plain rows, start + depth for tree nodes. Raises ValueError naming a wrong argument.
    """
