"""Ragged attention over paged KV with causal and tree rows, the torch reference."""

import torch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    tree_bits: torch.Tensor,
    is_tree: torch.Tensor,
    page_size: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Attention output [T, heads, head_dim] of query [T, heads, head_dim].

    The caches are [slots, kv heads, head_dim] and already hold this step's keys and values; query
    head h reads kv head h // (heads / kv heads). ``positions`` int64[T], ``cu_q`` int32[R + 1],
    ``kv_lens`` int32[R], ``page_table`` int32[R, P], ``tree_bits`` int64[T], ``is_tree`` uint8[R].
    ``window``: positions a token sees, itself included; 0 for all. Softmax is float32.
    """
    out = torch.empty_like(query)
    group = query.shape[1] // key_cache.shape[1]
    starts = cu_q.tolist()
    out[starts[-1] :] = 0  # padding behind all rows
    trees = is_tree.tolist()
    for row, kv_len in enumerate(kv_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        slots = _row_slots(page_table[row], kv_len, page_size)
        key = key_cache[slots].repeat_interleave(group, dim=1)
        value = value_cache[slots].repeat_interleave(group, dim=1)
        own = positions[begin:end]
        bits = tree_bits[begin:end] if trees[row] else None
        hidden = ~_visible(own, kv_len, bits, window)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key).float() * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, value)
    return out


def _row_slots(pages: torch.Tensor, kv_len: int, page_size: int) -> torch.Tensor:
    """int64[kv_len] slots of a row's sequence, in order."""
    index = torch.arange(kv_len, device=pages.device)
    return pages[index // page_size].long() * page_size + index % page_size


def _visible(
    own: torch.Tensor, kv_len: int, bits: torch.Tensor | None, window: int
) -> torch.Tensor:
    """bool[q_len, kv_len]: which keys each query sees."""
    q_len = own.shape[0]
    start = kv_len - q_len
    node = torch.arange(q_len, device=own.device)
    if bits is None:
        among_own = node[None] <= node[:, None]
    else:
        among_own = (bits[:, None] >> node[None]) & 1 == 1
    before = among_own.new_ones(q_len, start)
    visible = torch.cat((before, among_own), dim=1)
    if window:
        past = torch.arange(start, device=own.device)
        keys = torch.cat((past, own))
        visible &= own[:, None] - keys[None] < window
    return visible
