"""The acceptance walk over ragged draft trees, and what it leaves behind per slot."""

import numpy as np
from numpy.typing import NDArray

def walk(
    input_ids: NDArray[np.int64],
    parents: NDArray[np.int32] | None,
    cu_q: NDArray[np.int32],
    node_cu: NDArray[np.int32],
    targets: NDArray[np.int64],
    accept_lens_out: NDArray[np.int32],
    accept_cu_out: NDArray[np.int32],
    accept_idx_out: NDArray[np.int32],
    emitted_out: NDArray[np.int32],
    most: NDArray[np.int32] | None = None,
    trimmed_out: NDArray[np.int32] | None = None,
) -> tuple[int, bool]:
    """Return (tokens emitted, whether accepted nodes lie scattered); ValueError names an array."""

def advance(
    slots: NDArray[np.int32],
    starts: NDArray[np.int32],
    q_lens: NDArray[np.int32],
    node_cu: NDArray[np.int32],
    accept_cu: NDArray[np.int32],
    emitted: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    last_tokens: NDArray[np.int32],
    out_counts: NDArray[np.int32],
) -> None:
    """Move per-slot state over what each row emitted; ValueError names an array."""
