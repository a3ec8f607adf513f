"""The edits that requests want, at every node of a step on a GPU, and what they remember."""

import torch

from ...kernels.logit_edits_gpu import count_emitted, edit_logits
from ...kernels.token_bans_gpu import mask_banned, push_emitted
from ..forward_batch import ForwardBatch
from .staging import StagingViews
from .state import DeviceState


def edited_logits(
    logits: torch.Tensor,
    batch: ForwardBatch,
    staging: StagingViews,
    state: DeviceState,
    width: int,
) -> torch.Tensor:
    """float32[N, V]: the logits [N, V] with the rows' penalties, biases, minimum lengths and bans.

    ``width``: most nodes of a row.
    """
    edits, bans = state.edits, state.edits.bans
    edited = edit_logits(
        logits,
        staging.cu_q,
        staging.node_cu,
        staging.slots,
        batch.input_ids,
        batch.positions,
        batch.tree_bits,
        state.out_counts,
        edits.penalized,
        edits.penalties,
        edits.history,
        edits.min_new_tokens,
        edits.list_bounds,
        edits.list_ids,
        edits.list_values,
        width=width,
    )
    if bans.used:
        mask_banned(
            edited,
            staging.cu_q,
            staging.node_cu,
            staging.slots,
            batch.input_ids,
            batch.tree_bits,
            bans.disallowed,
            bans.ban_counts,
            bans.ban_bounds,
            bans.ban_tokens,
            bans.tails,
            width=width,
        )
    return edited


def note_emitted(
    tokens: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor, state: DeviceState
) -> None:
    """Remember what rows emitted: tokens int32[R, W], the first lens int32[R] of them count."""
    edits, bans = state.edits, state.edits.bans
    count_emitted(tokens, lens, slots, edits.penalized, edits.history)
    if bans.used:
        push_emitted(tokens, lens, slots, bans.ban_counts, bans.tails)
