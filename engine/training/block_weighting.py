"""How much each token of a block counts, by its place or by the draft's own chances."""

import torch


def decay_weights(drafts: int, gamma: float, device: torch.device) -> torch.Tensor:
    """float32[K]: exp(-i / gamma), from 1 at the first drafted token."""
    return torch.exp(-torch.arange(drafts, device=device, dtype=torch.float32) / gamma)


def dpace_weights(chance: torch.Tensor, valid: torch.Tensor, alpha: float) -> torch.Tensor:
    """float32[…, K] of the draft's probabilities of the wanted tokens (D-PACE).

    A token's weight is how much longer the accepted text gets with it: the chances, smoothed by
    ``alpha``, that the block is accepted up to it and up to each token behind it, added up.
    """
    smoothed = torch.where(valid, (1.0 - alpha) * chance + alpha, 1.0)
    reached = smoothed.cumprod(-1) * valid
    return reached.flip(-1).cumsum(-1).flip(-1)
