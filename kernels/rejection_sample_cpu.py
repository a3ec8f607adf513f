"""`rejection_sample` on a CPU: torch for the laws, native code for every draw."""

import torch

from .coupled_sample_cpu import coupled_sample
from .noise_streams import RESIDUAL
from .rejection_sample import judge


def rejection_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_rows: torch.Tensor,
    draft_ids: torch.Tensor | None,
) -> torch.Tensor:
    """int64[M]: see the reference; of unusable rows of logits the token means nothing."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    drafted = drafts >= 0
    rest = ~drafted
    if rest.any():
        tokens[rest] = _draw(
            logits[rest], temperatures[rest], top_ks[rest], top_ps[rest], min_ps[rest], seeds[rest],
            positions[rest],
        )  # fmt: skip
    if not drafted.any():
        return tokens
    accepted, left = judge(
        logits[drafted], temperatures[drafted], top_ks[drafted], top_ps[drafted], min_ps[drafted],
        seeds[drafted], positions[drafted], drafts[drafted], draft_logits, draft_rows[drafted],
        draft_ids,
    )  # fmt: skip
    tokens[drafted] = drafts[drafted]
    rejected = drafted.nonzero()[~accepted, 0]
    if len(rejected):
        tokens[rejected] = draw_unfiltered(
            torch.log(left[~accepted]).float(),
            torch.ones_like(temperatures[rejected]),
            seeds[rejected] ^ RESIDUAL,
            positions[rejected],
        )
    return tokens


def draw_unfiltered(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """int64[M]: a token a row of float32[M, V], as ``coupled_sample`` without filters."""
    rows = len(logits)
    return _draw(
        logits,
        temperatures,
        torch.zeros(rows, dtype=torch.int32),
        torch.ones(rows),
        torch.zeros(rows),
        seeds,
        positions,
    )


def _draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    coupled_sample(
        logits.contiguous().numpy(), temperatures.numpy(), top_ks.numpy(), top_ps.numpy(),
        min_ps.numpy(), seeds.numpy(), positions.numpy(), tokens.numpy(),
    )  # fmt: skip
    return tokens
