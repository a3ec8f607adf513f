"""Greedy choice over rows of logits, the torch reference."""

import torch


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """int64[N]: the id of each row's largest logit, the lowest one among equals.

    ``logits`` is float32[N, V]. A row with a NaN or an infinity has no choice: -1.
    """
    usable = torch.isfinite(logits).all(dim=1)
    equal_best = logits == logits.amax(dim=1, keepdim=True)
    # argmax does not promise which of several largest elements it returns; of a 0/1 row we ask
    # for the largest countdown, which is unique.
    countdown = torch.arange(logits.shape[1], 0, -1, device=logits.device)
    first = (equal_best * countdown).argmax(dim=1)
    return torch.where(usable, first, -1)
