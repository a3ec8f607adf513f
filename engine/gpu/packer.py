"""From a step plan (and host drafts) to the packed input of a step on the device."""

import numpy as np

from ...cython_ext.packed_rows import PackedRows
from ...engine_core.ids import I32, I64, i32
from ...engine_core.plan import HostDrafts, StepPlan
from .staging import StagingShape, field_edges
from .tiers import NO_PREFILL, Prefill


class StepPacker:
    """Checks plans and lays their rows out; ``max_slots`` S, ``vocab_size`` V.

    ``device_drafts``: a drafter on the device fills the verify rows of steps that are not
    late-bound, and of others what their drafts say.
    """

    def __init__(self, max_slots: int, vocab_size: int, device_drafts: bool = False) -> None:
        self._device_drafts = device_drafts
        self._max_slots = max_slots
        self._vocab_size = vocab_size

    def pack(self, plan: StepPlan, drafts: HostDrafts | None) -> PackedRows:
        """Lay the step out. Raises ValueError if the plan or the drafts break their contract."""
        given: tuple[bytes, ...] = ()
        if drafts is not None:
            given = (drafts.counts, drafts.tokens, drafts.parents, drafts.device_caps)
        return PackedRows(
            plan.slots,
            plan.kinds,
            plan.q_caps,
            plan.starts,
            plan.tokens,
            self._max_slots,
            self._vocab_size,
            self._device_drafts,
            *given,
        )


def prefill_of(packed: PackedRows) -> Prefill:
    """The prefill rows behind the verify rows; only where the latter lead."""
    if packed.decode_only:
        return NO_PREFILL
    return Prefill(packed.rows - packed.verify_rows, packed.prefill_tokens)


def places(packed: PackedRows, gap: int) -> slice | I64:
    """Where the rows stand in a block with ``gap`` rows of padding before the prefill rows."""
    if packed.decode_only or not gap:
        return slice(0, packed.rows)
    rows = np.arange(packed.rows)
    rows[packed.verify_rows :] += gap
    return rows


def fill(
    block: I32,
    shape: StagingShape,
    packed: PackedRows,
    plan: StepPlan,
    spare_slot: int,
    gap: int = 0,
    budget: int = -1,
) -> None:
    """Write the step into a block that has room for it; what is left over is padding.

    ``gap``: rows of padding before the prefill rows. ``budget``: see StepPlan.
    """
    entries = [(init.slot, init.cached_len, len(init.output) // 4) for init in plan.inits]
    edges = field_edges(shape)
    packed.fill(
        block,
        edges,
        spare_slot,
        gap,
        plan.page_slots,
        plan.page_indexes,
        plan.page_ids,
        np.array(entries, dtype=np.int32) if entries else None,
        plan.accept_caps,
        budget,
    )
    if shape.window is not None:
        _fill_window(block[edges[-1] :], shape.window, plan, shape.rows, places(packed, gap))


def _fill_window(room: I32, most: int, plan: StepPlan, rows: int, places: slice | I64) -> None:
    """``room`` begins with the window's fields, of ``most`` pages; the plan's rows have
    ``places``."""
    moved = len(plan.window_pages) // 4
    room[:moved] = i32(plan.window_pages)
    room[most : most + moved] = i32(plan.window_drafts)
    lows = room[2 * most : 2 * most + rows]
    lows[:] = 0
    lows[places] = i32(plan.window_lows)
    room[2 * most + rows] = moved
