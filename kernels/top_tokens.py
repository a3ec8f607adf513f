"""The likeliest tokens of each row of logits, the torch reference."""

import torch


def top_tokens(
    logits: torch.Tensor, count: int, names: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[N, K] tokens and float32[N, K] probabilities, the likeliest first.

    ``logits`` [N, V] of any float dtype up to float32; K = ``count`` <= V. The softmax is over all
    of V, in float32; of equal logits the lower index comes first. Token i is index i, or
    what int64[V] ``names`` has there. A row with a NaN or an infinity has tokens -1 and probabilities 0.
    """
    wide = logits.float()
    usable = torch.isfinite(wide).all(dim=1, keepdim=True)
    order = wide.sort(dim=1, descending=True, stable=True).indices[:, :count]
    probabilities = torch.softmax(wide, dim=1).gather(1, order)
    tokens = order if names is None else names[order]
    return torch.where(usable, tokens, -1), torch.where(usable, probabilities, 0.0)
