"""The index work of drafting as Triton kernels: one launch each."""

from functools import partial

import torch

from ...kernels.block_layout_gpu import block_layout, keep_newest
from ...kernels.draft_candidates_gpu import top_candidates
from ...kernels.draft_draw_gpu import draw_drafts
from ...kernels.draft_extend_gpu import extend_inputs
from ...kernels.draft_layout_gpu import chain_layout, tree_layout
from ...kernels.draft_nodes_gpu import select_tree, write_chains
from ...kernels.draft_state_gpu import keep_state, take_state
from ...kernels.draft_tree_gpu import expand_tree
from ...kernels.embedding_gpu import embed
from ...kernels.window_layout_gpu import draft_slots, window_layout, window_starts
from ..dependent_launch import launches_dependents
from .draft_ops import DraftOps

_MOST_ROWS = 4096  # of one step; more take a second launch


def gpu_draft_ops(device: torch.device) -> DraftOps:
    """Those for tensors on ``device``, all used in one stream."""
    arrived = torch.zeros(_MOST_ROWS, dtype=torch.int32, device=device)
    pdl = launches_dependents(device)
    return DraftOps(
        extend_inputs=partial(extend_inputs, pdl=pdl),
        chain_layout=partial(chain_layout, pdl=pdl),
        tree_layout=partial(tree_layout, pdl=pdl),
        top_candidates=partial(top_candidates, arrived=arrived, pdl=pdl),
        draw_drafts=partial(draw_drafts, pdl=pdl),
        write_chains=partial(write_chains, pdl=pdl),
        expand_tree=partial(expand_tree, pdl=pdl),
        select_tree=partial(select_tree, pdl=pdl),
        take_state=partial(take_state, pdl=pdl),
        keep_state=partial(keep_state, pdl=pdl),
        pick_rows=partial(embed, pdl=pdl),
        block_layout=partial(block_layout, pdl=pdl),
        keep_newest=partial(keep_newest, pdl=pdl),
        window_starts=partial(window_starts, pdl=pdl),
        window_layout=partial(window_layout, pdl=pdl),
        draft_slots=partial(draft_slots, pdl=pdl),
    )
