"""`rejection_sample` on a CPU: torch for the laws, native code for every draw."""

import torch

from .coupled_sample_cpu import coupled_sample
from .noise_streams import RESIDUAL
from .rejection_sample import accept, draft_law, left_over, target_law


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
        tokens[rest] = draw_filtered(
            logits[rest], temperatures[rest], top_ks[rest], top_ps[rest], min_ps[rest], seeds[rest],
            positions[rest],
        )  # fmt: skip
    if not drafted.any():
        return tokens
    seeds, positions = seeds[drafted], positions[drafted]
    temperatures = temperatures[drafted]
    p = target_law(
        logits[drafted], temperatures, top_ks[drafted], top_ps[drafted], min_ps[drafted],
        torch.float32,
    )  # fmt: skip
    q = draft_law(draft_logits[draft_rows[drafted]], temperatures, torch.float32)
    chosen = drafts[drafted]
    rest = ~accept(p, q, chosen, draft_ids, seeds, positions)
    if rest.any():
        left = left_over(p[rest], q[rest], draft_ids)
        chosen[rest] = draw_unfiltered(
            left.log_(), torch.ones(len(left)), seeds[rest] ^ RESIDUAL, positions[rest]
        )
    tokens[drafted] = chosen
    return tokens


def draw_unfiltered(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """int64[M]: a token a row of float32[M, V], as ``coupled_sample`` without filters."""
    rows = len(logits)
    return draw_filtered(
        logits,
        temperatures,
        torch.zeros(rows, dtype=torch.int32),
        torch.ones(rows),
        torch.zeros(rows),
        seeds,
        positions,
    )


def draw_filtered(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """int64[M]: ``coupled_sample``'s token of each row of float32[M, V]."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    coupled_sample(
        logits.contiguous().numpy(), temperatures.numpy(), top_ks.numpy(), top_ps.numpy(),
        min_ps.numpy(), seeds.numpy(), positions.numpy(), tokens.numpy(),
    )  # fmt: skip
    return tokens
