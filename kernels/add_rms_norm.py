"""A residual addition and the RMS norm of the sum, the torch reference."""

import torch

from .rms_norm import rms_norm


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gemma: bool = False,
) -> torch.Tensor:
    """Add x [T, H] to ``residual`` [T, H] in place and return the sum's norm [T, H].

    The sum is rounded to the dtype before it is normed; ``weight`` [H] and ``gemma`` are those of
    `rms_norm`.
    """
    residual += x
    return rms_norm(residual, weight, eps, gemma=gemma)
