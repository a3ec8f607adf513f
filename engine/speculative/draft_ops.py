"""The index work of drafting, as the device does it."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels import block_layout, draft_ops_cpu, window_layout

Op = Callable[..., None]


class DraftOps(NamedTuple):
    """Functions named and described in ``kernels/draft_*.py``, ``block_layout.py`` and
    ``window_layout.py``, and ``pick_rows``.
    """

    extend_inputs: Op
    chain_layout: Op
    tree_layout: Op
    top_candidates: Op
    draw_drafts: Op
    write_chains: Op
    expand_tree: Op
    select_tree: Op
    take_state: Op
    keep_state: Op
    pick_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    block_layout: Op
    keep_newest: Op
    window_starts: Op
    window_layout: Op
    draft_slots: Op


def pick_rows(index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows index[n] of ``rows`` [T, H], as [N, H]."""
    return rows.index_select(0, index)


_CPU = DraftOps(
    draft_ops_cpu.extend_inputs,
    draft_ops_cpu.chain_layout,
    draft_ops_cpu.tree_layout,
    draft_ops_cpu.top_candidates,
    draft_ops_cpu.draw_drafts,
    draft_ops_cpu.write_chains,
    draft_ops_cpu.expand_tree,
    draft_ops_cpu.select_tree,
    draft_ops_cpu.take_state,
    draft_ops_cpu.keep_state,
    draft_ops_cpu.pick_rows,
    block_layout.block_layout,
    block_layout.keep_newest,
    window_layout.window_starts,
    window_layout.window_layout,
    window_layout.draft_slots,
)


def draft_ops(device: torch.device) -> DraftOps:
    """Those for tensors on ``device``."""
    if device.type != "cuda":
        return _CPU
    # Loads triton, which machines without a GPU need not have.
    from .gpu_draft_ops import gpu_draft_ops

    return gpu_draft_ops(device)
