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
    columns = (logits, temperatures, top_ks, top_ps, min_ps, seeds, positions)
    drafted = drafts >= 0
    if not drafted.all():
        tokens[~drafted] = _draw(*(column[~drafted] for column in columns))
    if not drafted.any():
        return tokens
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions = (
        column[drafted] for column in columns
    )
    accepted, left = judge(
        logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, drafts[drafted],
        draft_logits, draft_rows[drafted], draft_ids,
    )  # fmt: skip
    chosen = drafts[drafted]
    rest = ~accepted
    if rest.any():
        chosen[rest] = draw_unfiltered(
            torch.log(left[rest]).float(),
            torch.ones_like(temperatures[rest]),
            seeds[rest] ^ RESIDUAL,
            positions[rest],
        )
    tokens[drafted] = chosen
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


def _draw(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    coupled_sample(
        logits.contiguous().numpy(), *(column.numpy() for column in columns), tokens.numpy()
    )
    return tokens
