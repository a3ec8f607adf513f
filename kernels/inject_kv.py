"""Keys and values of all layers from one projection, into the KV cache; the torch reference."""

import torch

from .rms_norm import rms_norm
from .rotary import apply_rotary


def inject_kv(
    kv: torch.Tensor,
    k_norms: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of T tokens in N layers.

    In: kv [T, N * 2 * KV * D], of each layer the keys of its KV heads, then their values; bias of
    that width; k_norms [N, D], the layers' RMS-norm weights over a key; cos, sin float32[P, D / 2],
    read at positions int64[T]; kv_slots int64[T].

    Out: cache [N, 2, slots, KV, D] at those slots. float32 inside, one rounding at the end.
    """
    layers, _, _, heads, dim = cache.shape
    wide = kv.float() if bias is None else kv.float() + bias.float()
    wide = wide.view(len(kv), layers, 2, heads, dim)
    row_cos, row_sin = cos[positions], sin[positions]
    for layer in range(layers):
        key = wide[:, layer, 0]
        if k_norms is not None:
            key = rms_norm(key, k_norms[layer].float(), eps)
        cache[layer, 0, kv_slots] = apply_rotary(key, row_cos, row_sin).to(cache.dtype)
        cache[layer, 1, kv_slots] = wide[:, layer, 1].to(cache.dtype)
