"""`coupled_sample` for CPU tensors' arrays: noise is computed only where it can matter."""

import numpy as np
from numpy.typing import NDArray

def coupled_sample(
    logits: NDArray[np.float32],
    temperatures: NDArray[np.float32],
    top_ks: NDArray[np.int32],
    top_ps: NDArray[np.float32],
    min_ps: NDArray[np.float32],
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
    tokens_out: NDArray[np.int64],
) -> None:
    """Write a token a row; arguments as of the torch reference; ValueError on short arrays."""
