"""From a step plan (and host drafts) to the packed input of a step on the device."""

from typing import NamedTuple

import numpy as np

from ...cython_ext.step_block import fill_block, tally_rows
from ...cython_ext.step_rows import resolve_rows
from ...engine_core.ids import I32, I64, U8, i32, u8
from ...engine_core.plan import HostDrafts, StepPlan
from .draft_room import draft_room
from .staging import StagingShape, field_edges
from .tiers import Prefill


class Packed(NamedTuple):
    """A step as the host knows it: sizes, and arrays by row, token, node.

    ``verify_rows`` leading rows are verify rows unless it is -1 (the kinds are mixed up).
    ``longest``: the most query tokens of a prefill row.
    ``caps`` int32[R]: drafts that the device fills in; until then they are padding. None: none.
    """

    rows: int
    tokens: int
    nodes: int
    verify_rows: int
    longest: int
    slots: I32
    kinds: U8
    starts: I32
    caps: I32 | None
    q_lens: I32
    cu_q: I32
    node_cu: I32
    token_ids: I64
    parents: I32
    node_index: I64
    depths: I32

    @property
    def decode_only(self) -> bool:
        """Whether every row is a verify row, so that every token is a node."""
        return self.verify_rows == self.rows

    @property
    def prefill(self) -> Prefill:
        """The prefill rows behind the verify rows; only where the latter lead."""
        first = int(self.cu_q[self.verify_rows])
        return Prefill(self.rows - self.verify_rows, self.tokens - first)

    def places(self, behind: int) -> slice | I64:
        """Where the rows stand in a block whose prefill rows begin at row ``behind``."""
        if self.decode_only:
            return slice(0, self.rows)
        rows = np.arange(self.rows)
        rows[self.verify_rows :] += behind - self.verify_rows
        return rows


class StepPacker:
    """Checks plans and lays their rows out; ``max_slots`` S, ``vocab_size`` V.

    ``device_drafts``: there is a drafter on the device (see ``draft_room``).
    """

    def __init__(self, max_slots: int, vocab_size: int, device_drafts: bool = False) -> None:
        self._device_drafts = device_drafts
        # The device knows the lengths and last tokens; here every slot is empty and ends in 0.
        self._no_state = np.zeros(max_slots, dtype=np.int32)
        self._vocab_size = vocab_size

    def pack(self, plan: StepPlan, drafts: HostDrafts | None) -> Packed:
        """Lay the step out. Raises ValueError if the plan or the drafts break their contract."""
        slots, kinds, given = i32(plan.slots), u8(plan.kinds), i32(plan.tokens)
        rows, room = len(slots), draft_room(plan, drafts, self._device_drafts)
        most = rows + len(given) + (0 if room.tokens is None else len(room.tokens))
        ids, index = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        parents = np.empty(most, dtype=np.int32)
        starts, q_lens, depths = np.empty((3, rows), dtype=np.int32)
        cu_q, node_cu = np.empty((2, rows + 1), dtype=np.int32)
        total, nodes, _ = resolve_rows(
            slots,
            kinds,
            i32(plan.q_caps),
            i32(plan.starts),
            given,
            room.counts,
            room.tokens,
            room.parents,
            self._no_state,
            self._no_state,
            self._vocab_size,
            starts,
            q_lens,
            ids,
            parents,
            node_cu,
            index,
            depths,
        )
        leading, longest = tally_rows(kinds, q_lens, cu_q)
        if room.caps is not None:
            of_device = room.caps > 0
            depths[of_device] = 0
            parents[:total][np.repeat(of_device, q_lens)] = -1
        return Packed(
            rows=rows,
            tokens=total,
            nodes=nodes,
            verify_rows=leading,
            longest=longest,
            slots=slots,
            kinds=kinds,
            starts=i32(plan.starts),
            caps=room.caps,
            q_lens=q_lens,
            cu_q=cu_q,
            node_cu=node_cu,
            token_ids=ids[:total],
            parents=parents[:total],
            node_index=index[:nodes],
            depths=depths,
        )


def fill(
    block: I32,
    shape: StagingShape,
    packed: Packed,
    plan: StepPlan,
    spare_slot: int,
    behind: int | None = None,
    budget: int = -1,
) -> None:
    """Write the step into a block that has room for it; what is left over is padding.

    ``behind``: the row at which prefill rows begin, if not right behind the verify rows.
    ``budget``: see StepPlan.
    """
    leading = max(0, packed.verify_rows)
    entries = [(init.slot, init.cached_len, len(init.output) // 4) for init in plan.inits]
    fill_block(
        block,
        field_edges(shape),
        spare_slot,
        packed.tokens,
        packed.nodes,
        leading,
        0 if behind is None else behind - leading,
        packed.slots,
        packed.kinds,
        packed.starts,
        packed.caps,
        packed.cu_q,
        packed.node_cu,
        packed.token_ids,
        packed.parents,
        packed.node_index,
        i32(plan.page_slots),
        i32(plan.page_indexes),
        i32(plan.page_ids),
        np.array(entries, dtype=np.int32) if entries else None,
    )
    caps, at = i32(plan.accept_caps), int(field_edges(shape)[-1])
    block[at : at + shape.rows] = 0
    block[at : at + len(caps)] = caps
    block[at + shape.rows] = budget
    if shape.window is not None:
        places = slice(0, packed.rows) if behind is None else packed.places(behind)
        _fill_window(block[at + shape.rows + 1 :], shape.window, plan, shape.rows, places)


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
