"""How sure a block draft's confidence head is of its drafts; torch operations."""

import torch
import torch.nn.functional as F


def confidence_logits(
    weight: torch.Tensor,
    bias: torch.Tensor,
    before: torch.Tensor | None,
    hidden: torch.Tensor,
    bonus: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """float32[R, D] of D drafts, not yet squashed (block_drafts.md 2.6).

    ``hidden`` [D, R, H]; ``tokens`` int64[D, R], which follow ``bonus`` int64[R]. ``weight`` [H] or
    [H + r] and ``bias`` [] float32; ``before`` [V, r]: embeddings of the token before, for heads
    that read it. Sums are float32.
    """
    taken = hidden.float()
    if before is not None:
        ids = torch.cat((bonus[None], tokens[:-1]))
        taken = torch.cat((taken, F.embedding(ids, before).float()), dim=2)
    return (taken @ weight + bias).t().contiguous()
