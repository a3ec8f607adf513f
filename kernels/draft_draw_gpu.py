"""`draw_drafts` on the GPU: the target's sampler, without its filters."""

import torch

from .coupled_sample_gpu import coupled_sample
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
    pdl: bool = False,
) -> None:
    """A token of each of N rows, see the reference. Raises ValueError unless rows are contiguous.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    heat = temperatures.clamp(min=LEAST_HEAT)
    ids = coupled_sample(
        logits.float() if logits.dtype == torch.float16 else logits,
        heat,
        # Not read: nothing is filtered.
        heat,
        heat,
        heat,
        seeds ^ DRAFT,
        positions,
        active=sampled,
        filtered=False,
        pdl=pdl,
    ).clamp_(min=0)
    tokens.copy_((ids if token_ids is None else token_ids[ids])[:, None])
