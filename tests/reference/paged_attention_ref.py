"""Attention over paged KV, one token and query head at a time, in float64."""

import torch


def visible_keys(
    start: int, node: int, mask: int | None, positions: list[int], window: int
) -> list[int]:
    """Sequence indices that token ``node`` of a row sees; ``start`` tokens precede the row.

    ``mask`` None is a causal row; ``positions`` are those of the row's own tokens.
    """
    own = [j for j in range(len(positions)) if (j <= node if mask is None else mask >> j & 1)]
    keys = [(index, index) for index in range(start)]
    keys += [(start + j, positions[j]) for j in own]
    return [i for i, position in keys if window == 0 or positions[node] - position < window]


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: list[int],
    keys: list[int],
    scale: float,
) -> torch.Tensor:
    """float64[heads, head_dim] for one token: query [heads, head_dim], caches [slots, kv, dim]."""
    heads, group = query.shape[0], query.shape[0] // key_cache.shape[1]
    used = torch.tensor([slots[index] for index in keys])
    rows = []
    for head in range(heads):
        scores = key_cache[used, head // group].double() @ query[head].double() * scale
        weights = torch.exp(scores - scores.max())
        rows.append(weights @ value_cache[used, head // group].double() / weights.sum())
    return torch.stack(rows)
