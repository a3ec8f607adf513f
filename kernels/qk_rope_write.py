"""Bias, q/k norm, rotary position and the write to the KV cache, the torch reference."""

import torch

from .rms_norm import rms_norm
from .rotary import apply_rotary


def qk_norm_rope_write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the query [T, heads, D] of a qkv projection; write its keys and values.

    ``qkv`` [T, (heads + 2 kv heads) * D] and ``bias`` of that width; ``q_norm`` and ``k_norm``
    [D] are RMS-norm weights over each head; ``cos`` and ``sin`` float32[P, D / 2] are read at
    ``positions`` int64[T]; ``kv_slots`` int64[T] are the rows of the caches [slots, kv heads, D]
    to write. float32 inside, one rounding at the end.
    """
    wide = qkv.float()
    if bias is not None:
        wide = wide + bias.float()
    wide = wide.view(qkv.shape[0], num_heads + 2 * num_kv_heads, key_cache.shape[2])
    query, key, value = torch.split(wide, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        query = rms_norm(query, q_norm.float(), eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm.float(), eps)
    row_cos, row_sin = cos[positions], sin[positions]
    key_cache[kv_slots] = apply_rotary(key, row_cos, row_sin).to(key_cache.dtype)
    value_cache[kv_slots] = value.to(value_cache.dtype)
    return apply_rotary(query, row_cos, row_sin).to(qkv.dtype)
