"""Attention of many short rows at once: the reference's, which takes them one after the other."""

import torch


def batched_attention(
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
    """See ``paged_attention``; rows are padded to the longest one."""
    begin, lens = cu_q[:-1].long()[:, None], cu_q.diff().long()[:, None]
    q_most, kv_most = int(lens.max()), int(kv_lens.max())
    node, key_at = torch.arange(q_most)[None], torch.arange(kv_most)[None]
    inside = node < lens
    token = torch.where(inside, begin + node, 0)
    start = kv_lens.long()[:, None] - lens
    own = key_at - start  # [R, K]: the key's number among the row's own tokens
    is_own = (own >= 0) & (own < lens)
    own = own.clamp(0, q_most - 1)
    bits = torch.where(is_tree[:, None] == 1, tree_bits[token], (2 << node) - 1)
    sees = torch.where(is_own[:, None], (bits[:, :, None] >> own[:, None]) & 1 == 1, True)
    sees &= (key_at < kv_lens[:, None])[:, None]
    where = positions[token]
    if window:
        key_pos = torch.where(is_own, where.gather(1, own), key_at)
        sees &= where[:, :, None] - key_pos[:, None] < window
    sees |= ~inside[:, :, None]  # whatever padding sees, it is thrown away
    pages = page_table[:, (key_at // page_size)[0]].long()
    slots = pages * page_size + key_at % page_size
    group = query.shape[1] // key_cache.shape[1]
    key = key_cache[slots].repeat_interleave(group, dim=2)
    value = value_cache[slots].repeat_interleave(group, dim=2)
    scores = torch.einsum("rqhd,rkhd->rhqk", query[token], key).float() * scale
    weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1).to(query.dtype)
    found = torch.einsum("rhqk,rkhd->rqhd", weights, value)
    out = torch.empty_like(query)
    out[token[inside]] = found[inside]
    return out
