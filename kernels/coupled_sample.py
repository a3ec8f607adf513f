"""Coupled sampling: Gumbel-max with counter-based noise, the torch reference."""

import torch

from .philox import philox_words


def coupled_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """int64[M]: a token a row, drawn from the filtered softmax of logits / temperature.

    ``logits`` float32[M, V] (-inf excludes a token); ``temperatures`` float32[M] > 0; ``top_ks``
    int32[M], below 1 for all; ``top_ps`` float32[M] in (0, 1]; ``min_ps`` float32[M] in [0, 1];
    ``seeds`` int64[M]; ``positions`` int64[M], where in the sequence the token will stand.

    Filters keep a prefix of the tokens sorted by falling logit (lower ids first among equals):
    the first k; of those the shortest prefix that holds ``top_p`` of their probability; of those
    the ones with at least ``min_p`` times the best one's probability. The draw is the argmax of
    scaled logit + Gumbel noise, so it is a function of the row alone. A row with a NaN or +inf, or
    of nothing but -inf, has none: -1.
    """
    scaled = logits.double() / temperatures.double()[:, None]
    words = philox_words(seeds, positions, logits.shape[1])
    uniform = (words.double() + 0.5) * 2.0**-32
    score = scaled - torch.log(-torch.log(uniform))
    # argmax among what the filters keep
    kept = kept_tokens(scaled, top_ks, top_ps, min_ps)
    drawn = score.masked_fill(~kept, -torch.inf).argmax(dim=1)
    return torch.where(usable_rows(logits), drawn, -1)


def usable_rows(logits: torch.Tensor) -> torch.Tensor:
    """bool[M]: rows of float32[M, V] that something can be drawn from."""
    return (logits < torch.inf).all(dim=1) & (logits > -torch.inf).any(dim=1)


def kept_tokens(
    scaled: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """bool[M, V]: the tokens that all three filters keep."""
    vocab = scaled.shape[1]
    ordered, ids = scaled.sort(dim=1, descending=True, stable=True)
    weights = torch.exp(ordered - ordered[:, :1])
    rank = torch.arange(vocab, device=scaled.device)[None]
    limit = torch.where(top_ks < 1, vocab, top_ks)[:, None]
    weights = weights.masked_fill(rank >= limit, 0.0)
    before = weights.cumsum(dim=1) - weights
    total = weights.sum(dim=1, keepdim=True)
    top_p = top_ps.double()[:, None]
    keep = (rank < limit) & (weights >= min_ps.double()[:, None])
    keep &= (top_p >= 1.0) | (before < top_p * total)
    return torch.zeros_like(keep).scatter_(1, ids, keep)
