"""`threshold_sample` on a CPU: torch for the laws of nodes with children, native code for draws."""

import torch

from .noise_streams import RESIDUAL
from .rejection_sample import target_law
from .rejection_sample_cpu import draw_filtered, draw_unfiltered
from .threshold_sample import Thresholds, accepted_child, coins, untried


def threshold_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    thresholds: Thresholds,
) -> torch.Tensor:
    """int64[M]: see the reference; of unusable rows of logits the token means nothing."""
    child = (parents >= 0).nonzero()[:, 0]
    trying, parent = torch.unique(parents[child], return_inverse=True)
    p = target_law(
        logits[trying], temperatures[trying], top_ks[trying], top_ps[trying], min_ps[trying],
        torch.float32,
    )  # fmt: skip
    first = accepted_child(
        p, child, parent, drafts[child], coins(seeds[trying], positions[trying]), thresholds
    )
    tokens = drafts.clone()
    rest = torch.ones_like(parents, dtype=torch.bool).index_fill_(0, trying, False)
    if rest.any():
        tokens[rest] = draw_filtered(
            logits[rest], temperatures[rest], top_ks[rest], top_ps[rest], min_ps[rest],
            seeds[rest], positions[rest],
        )  # fmt: skip
    chosen = drafts[first.clamp(min=0)]
    refused = (first < 0).nonzero()[:, 0]
    if len(refused):
        left, at = untried(p, parent, drafts[child])[refused], trying[refused]
        chosen[refused] = draw_unfiltered(
            left.log_(), torch.ones(len(at)), seeds[at] ^ RESIDUAL, positions[at]
        )
    tokens[trying] = chosen
    return tokens
