"""The index work of drafting, as the device does it."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.draft_candidates import top_candidates
from ...kernels.draft_extend import extend_inputs
from ...kernels.draft_layout import chain_layout, tree_layout
from ...kernels.draft_nodes import select_tree, write_chains
from ...kernels.draft_state import keep_state, take_state
from ...kernels.draft_tree import expand_tree

Op = Callable[..., None]


class DraftOps(NamedTuple):
    """Functions named and described in ``kernels/draft_*.py``, and ``pick_rows``."""

    extend_inputs: Op
    chain_layout: Op
    tree_layout: Op
    top_candidates: Op
    write_chains: Op
    expand_tree: Op
    select_tree: Op
    take_state: Op
    keep_state: Op
    pick_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def pick_rows(index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows index[n] of ``rows`` [T, H], as [N, H]."""
    return rows.index_select(0, index)


_TORCH = DraftOps(
    extend_inputs,
    chain_layout,
    tree_layout,
    top_candidates,
    write_chains,
    expand_tree,
    select_tree,
    take_state,
    keep_state,
    pick_rows,
)


def draft_ops(device: torch.device) -> DraftOps:
    """Those for tensors on ``device``."""
    if device.type != "cuda":
        return _TORCH
    # Loads triton, which machines without a GPU need not have.
    from .gpu_draft_ops import gpu_draft_ops

    return gpu_draft_ops(device)
