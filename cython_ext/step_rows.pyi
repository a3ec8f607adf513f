"""Rows of a step plan resolved against per-slot state: which tokens the target model sees."""

import numpy as np
from numpy.typing import NDArray

__pyx_capi__: dict[str, object]  # what other compiled modules call

def resolve_rows(
    slots: NDArray[np.int32],
    kinds: NDArray[np.uint8],
    q_caps: NDArray[np.int32],
    starts: NDArray[np.int32],
    tokens: NDArray[np.int32],
    counts: NDArray[np.int32] | None,
    draft_tokens: NDArray[np.int32] | None,
    draft_parents: NDArray[np.int32] | None,
    seq_lens: NDArray[np.int32],
    last_tokens: NDArray[np.int32],
    vocab_size: int,
    starts_out: NDArray[np.int32],
    q_lens_out: NDArray[np.int32],
    input_ids_out: NDArray[np.int64],
    parents_out: NDArray[np.int32],
    node_cu_out: NDArray[np.int32],
    logits_index_out: NDArray[np.int64],
    depths_out: NDArray[np.int32],
) -> tuple[int, int, bool]:
    """Return (query tokens T, nodes N, whether a row branches); ValueError names the row."""
