"""What a draft model proposes where its drafts are drawn; torch operations."""

import torch

from .coupled_sample import coupled_sample, usable_rows
from .greedy_argmax import greedy_argmax
from .noise_streams import DRAFT
from .rejection_sample import LEAST_HEAT


def draw_drafts(
    logits: torch.Tensor,
    token_ids: torch.Tensor | None,
    temperatures: torch.Tensor,
    sampled: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    tokens: torch.Tensor,
) -> None:
    """A token of each of N rows, drawn from softmax(logits / temperature) where it is ``sampled``.

    In: logits [N, V] of any float dtype; token_ids int64[V], the target's id of each draft id, or
    None where they are the same. temperatures float32[N], 1e-5 at least counts; seeds int64[N], the
    requests'; sampled bool[N]; positions int64[N], which part of a seed's noise is the row's.

    Out: tokens int64[N, 1], ids of the target; of rows that are not sampled the likeliest, the
    lower id among equals. Of a row with a NaN or +inf the token is some id. Nothing is raised.
    """
    values = logits.float()
    drawn = sampled & usable_rows(values)
    ids = greedy_argmax(values).clamp_(min=0)
    if drawn.any():
        count = int(drawn.sum())
        ids[drawn] = coupled_sample(
            values[drawn],
            temperatures[drawn].clamp(min=LEAST_HEAT),
            torch.zeros(count, dtype=torch.int32),
            torch.ones(count),
            torch.zeros(count),
            seeds[drawn] ^ DRAFT,
            positions[drawn],
        )
    tokens.copy_((ids if token_ids is None else token_ids[ids])[:, None])
