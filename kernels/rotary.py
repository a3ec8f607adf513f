"""Rotary position embedding in the half-split layout, the torch reference."""

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x [T, heads, head_dim].

    ``cos`` and ``sin`` are the tokens' own rows, float32[T, head_dim / 2].
    """
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1)
