"""Rows of the embedding table, the torch reference."""

import torch
import torch.nn.functional as F


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[T, H]: row ids[t] of ``table`` [V, H].

    An id of int64[T] outside 0..V-1, which is padding, reads row 0.
    """
    known = (ids >= 0) & (ids < table.shape[0])
    return F.embedding(torch.where(known, ids, 0), table)
