"""What a step's launches and its staging block look like: for a tier, and for one step exactly."""

import numpy as np

from ...cython_ext.packed_rows import PackedRows
from ...engine_core.plan import StepPlan
from ..forward_batch import RowGroup
from .device_step import StepShape
from .staging import StagingShape
from .tiers import Tier

_SPARE_UPDATES = 16  # page-table changes that rows need beyond what a step's tokens explain
_ENTRY_UPDATES = 1024  # of requests that enter: their whole prompts' pages, cached ones too


def tier_shape(tier: Tier) -> StepShape:
    """The launches of a tier's steps."""
    groups: tuple[RowGroup, ...] = (RowGroup(0, tier.rows, tier.width),)
    if tier.chunks:
        groups += (RowGroup(tier.rows, tier.all_rows, tier.longest, tier.longest),)
    return StepShape(
        tier.width,
        groups,
        tier.nodes if tier.chunks else None,
        tier.width > 1,
        tier.sampled,
        tier.edits,
        tier.tokens if tier.compact else None,
        tier.masked,
    )


def tier_staging(
    tier: Tier, page_size: int, reach: int = 1, windowed: bool = False
) -> StagingShape:
    """Room for a tier's step, with a verify row's new pages and those of requests that enter.

    ``reach``: tokens from a row's first on that drafts write KV for, where that is more than the
    verify row itself. A row's first verify step is given pages for all of them at once.
    ``windowed``: a draft has a window, whose pages come and go so too, with windows of requests
    that end beside them.
    """
    pages = 1 + -(-max(tier.width, reach) // page_size)
    updates = pages * tier.rows + _SPARE_UPDATES + (_ENTRY_UPDATES if tier.chunks else 0)
    window = 2 * pages * tier.rows + _ENTRY_UPDATES if windowed else None
    return StagingShape(tier.all_rows, tier.planned, updates, tier.chunks, window)


def exact_shape(
    packed: PackedRows,
    sampled: bool,
    edits: bool,
    verified: int | None = None,
    masked: bool = False,
) -> StepShape:
    """The launches of this very step; ``verified``: see StepShape."""
    width = max(1, int(np.diff(packed.node_cu).max()))
    nodes: int | None = None
    if packed.nodes != packed.tokens:
        # What is not verified are nodes.
        nodes = packed.nodes - (0 if verified is None else packed.tokens - verified)
    return StepShape(width, _groups(packed), nodes, width > 1, sampled, edits, verified, masked)


def exact_staging(packed: PackedRows, plan: StepPlan) -> StagingShape:
    """Room for this very step."""
    window = len(plan.window_pages) // 4 if plan.window_lows else None
    updates = len(plan.page_slots) // 4
    return StagingShape(packed.rows, packed.tokens, updates, len(plan.inits), window)


def _groups(packed: PackedRows) -> tuple[RowGroup, ...]:
    rows, verify = packed.rows, packed.verify_rows
    if verify < 0:
        return (RowGroup(0, rows, int(packed.q_lens.max())),)
    groups = []
    if verify:
        groups.append(RowGroup(0, verify, int(packed.q_lens[:verify].max())))
    if rows > verify:
        groups.append(RowGroup(verify, rows, packed.longest))
    return tuple(groups)
