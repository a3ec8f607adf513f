"""What an EAGLE draft takes in: a token's embedding beside a hidden state, the torch reference."""

import torch

from .embedding import embed
from .rms_norm import rms_norm


def draft_input(
    ids: torch.Tensor,
    table: torch.Tensor,
    hidden: torch.Tensor,
    embed_norm: torch.Tensor | None,
    hidden_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """[T, E + H]: the embeddings of int64[T] ids in ``table`` [V, E] beside ``hidden`` [T, H].

    Each half is normed by its weight, [E] and [H], where it has one. An id outside 0..V-1, which
    is padding, reads row 0. All of one float dtype.
    """
    left = embed(ids, table)
    if embed_norm is not None:
        left = rms_norm(left, embed_norm, eps)
    right = hidden if hidden_norm is None else rms_norm(hidden, hidden_norm, eps)
    return torch.cat((left, right), dim=1)
