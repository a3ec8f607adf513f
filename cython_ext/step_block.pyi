"""A step's rows written into the one block of int32 that is copied to a device."""

import numpy as np
from numpy.typing import NDArray

def tally_rows(
    kinds: NDArray[np.uint8], q_lens: NDArray[np.int32], cu_q_out: NDArray[np.int32]
) -> tuple[int, int]:
    """Write prefix sums; return (leading verify rows or -1, longest other row)."""

def fill_block(
    block: NDArray[np.int32],
    edges: NDArray[np.int64],
    spare_slot: int,
    tokens: int,
    nodes: int,
    leading: int,
    gap: int,
    slots: NDArray[np.int32],
    kinds: NDArray[np.uint8],
    starts: NDArray[np.int32],
    caps: NDArray[np.int32] | None,
    cu_q: NDArray[np.int32],
    node_cu: NDArray[np.int32],
    ids: NDArray[np.int64],
    parents: NDArray[np.int32],
    node_index: NDArray[np.int64],
    page_slots: NDArray[np.int32],
    page_columns: NDArray[np.int32],
    page_ids: NDArray[np.int32],
    entries: NDArray[np.int32] | None,
) -> None:
    """Write a step to its block and pad the rest; ValueError for what does not fit."""
