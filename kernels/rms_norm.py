"""RMS normalisation, the torch reference."""

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, gemma: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in float32.

    The normed value is rounded to x's dtype before the weight is applied. ``gemma``: multiply by
    1 + weight in float32 instead and round once, as Gemma's layers do.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if gemma:
        return (wide * scale * (1.0 + weight.float())).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight
