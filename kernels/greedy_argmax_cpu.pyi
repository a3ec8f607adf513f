"""`greedy_argmax` for CPU tensors' arrays: one vectorised pass over the logits."""

import numpy as np
from numpy.typing import NDArray

def greedy_argmax(logits: NDArray[np.float32], ids_out: NDArray[np.int64]) -> None:
    """Write each row's id of the largest logit, -1 if the row has a NaN or an infinity."""

def greedy_tokens(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64] | None, out: NDArray[np.int64]
) -> None:
    """Write the token [N, 1] of each row's largest logit, 0's where the row is unusable.

    ``token_ids`` [V]: the token of each column, None where they are the same.
    """
