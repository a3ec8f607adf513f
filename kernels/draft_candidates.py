"""What a draft model proposes at a node: its most likely tokens; torch operations."""

import torch

from .greedy_argmax import greedy_argmax


def top_candidates(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    *,
    tokens: torch.Tensor,
    probs: torch.Tensor | None,
) -> None:
    """The K most likely tokens of each of N rows, the likeliest first, lower ids among equals.

    In: logits [N, V] of any float dtype; token_ids int64[V], the target's id of each draft id, or
    None where they are the same.

    Out: tokens int64[N, K], ids of the target; probs float32[N, K], their softmax probabilities,
    or None for K = 1, where nobody asks. Of a row with a NaN or an infinity the tokens are some
    ids and the probabilities 0. Nothing is raised.
    """
    values = logits.float()
    if probs is None:
        ids = greedy_argmax(values).clamp_(min=0)[:, None]
    else:
        usable = torch.isfinite(values).all(dim=1, keepdim=True)
        chance = torch.where(usable, torch.softmax(values, dim=1), 0)
        # A stable sort keeps equals in the order of their ids, which topk does not promise.
        ranked = torch.sort(values, dim=1, descending=True, stable=True)
        ids = ranked.indices[:, : tokens.shape[1]]
        probs.copy_(chance.gather(1, ids))
    tokens.copy_(ids if token_ids is None else token_ids[ids])
