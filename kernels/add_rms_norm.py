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
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add x [T, H] to ``residual`` [T, H] and return the sum's norm [T, H].

    The sum is rounded to the dtype before it is normed, and written to ``total`` [T, H], else in
    place; ``weight`` [H] and ``gemma`` are those of `rms_norm`.
    """
    total = residual if total is None else total
    torch.add(residual, x, out=total)
    return rms_norm(total, weight, eps, gemma=gemma)
