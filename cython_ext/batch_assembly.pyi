"""The rows of a step as the flat ragged arrays that the model consumes, and KV compaction."""

import numpy as np
from numpy.typing import NDArray

def assemble(
    slots: NDArray[np.int32],
    q_lens: NDArray[np.int32],
    starts: NDArray[np.int32],
    parents: NDArray[np.int32] | None,
    page_table: NDArray[np.int32],
    page_size: int,
    positions_out: NDArray[np.int64],
    kv_slots_out: NDArray[np.int64],
    row_of_token_out: NDArray[np.int32],
    cu_q_out: NDArray[np.int32],
    kv_lens_out: NDArray[np.int32],
    tree_bits_out: NDArray[np.uint64],
    is_tree_out: NDArray[np.uint8],
) -> int:
    """Flatten R rows into T query tokens and return T; ValueError names the row or the array."""

def compact_accepted(
    slots: NDArray[np.int32],
    starts: NDArray[np.int32],
    page_table: NDArray[np.int32],
    page_size: int,
    accept_cu: NDArray[np.int32],
    accept_idx: NDArray[np.int32],
    src_out: NDArray[np.int64],
    dst_out: NDArray[np.int64],
) -> int:
    """Write the KV moves that put each row's accepted nodes side by side; return their number."""
