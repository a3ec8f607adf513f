import numpy as np
from numpy.typing import NDArray

def merge_trees(
    caps: NDArray[np.int32],
    counts: NDArray[np.int32],
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    weights: NDArray[np.float32],
    other_counts: NDArray[np.int32],
    other_tokens: NDArray[np.int32],
    other_parents: NDArray[np.int32],
    other_weights: NDArray[np.float32],
) -> None:
    """Add each row's other tree to its first one, in place.

    Trees are as `NgramTrie.propose` writes them: `counts` [R], the others [R, N]. Equal paths
    become one node that keeps the first tree's weight; row r never exceeds `caps[r]` nodes.
    ValueError names a shape or a row that does not fit.
    """
