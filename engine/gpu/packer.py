"""From a step plan (and host drafts) to the packed input of a step on the device."""

from typing import NamedTuple

import numpy as np

from ...cython_ext.step_rows import resolve_rows
from ...engine_core.ids import I32, RowKind, i32, u8
from ...engine_core.plan import HostDrafts, StepPlan
from .draft_room import draft_room
from .staging import StagingArrays

I64 = np.int64


class Packed(NamedTuple):
    """A step as the host knows it: sizes, and int32 arrays by row, token, node.

    ``verify_rows`` leading rows are verify rows unless it is -1 (the kinds are mixed up).
    ``longest``: the most query tokens of a prefill row. ``branches``: whether any drafts branch.
    ``caps`` int32[R]: drafts that the device fills in; until then they are padding.
    """

    rows: int
    tokens: int
    nodes: int
    branches: bool
    verify_rows: int
    longest: int
    slots: I32
    kinds: I32
    starts: I32
    caps: I32
    q_lens: I32
    cu_q: I32
    node_cu: I32
    token_ids: I32
    parents: I32
    node_index: I32
    depths: I32

    @property
    def decode_only(self) -> bool:
        """Whether every row is a verify row, so that every token is a node."""
        return self.verify_rows == self.rows


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
        ids, index = np.empty(most, dtype=I64), np.empty(most, dtype=I64)
        parents = np.empty(most, dtype=np.int32)
        starts, q_lens, depths = (np.empty(rows, dtype=np.int32) for _ in range(3))
        cu_q, node_cu = (np.zeros(rows + 1, dtype=np.int32) for _ in range(2))
        total, nodes, branches = resolve_rows(
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
        np.cumsum(q_lens, out=cu_q[1:])
        if room.caps is not None:
            of_device = room.caps > 0
            depths[of_device] = 0
            parents[:total][np.repeat(of_device, q_lens)] = -1
        verifies = kinds == RowKind.VERIFY
        leading = int(verifies.sum())
        if not verifies[:leading].all():
            leading = -1
        chunks = q_lens[~verifies]
        return Packed(
            rows=rows,
            tokens=total,
            nodes=nodes,
            branches=branches,
            verify_rows=leading,
            longest=int(chunks.max()) if len(chunks) else 0,
            slots=slots,
            kinds=kinds.astype(np.int32),
            starts=i32(plan.starts),
            caps=np.zeros(rows, dtype=np.int32) if room.caps is None else room.caps,
            q_lens=q_lens,
            cu_q=cu_q,
            node_cu=node_cu,
            token_ids=ids[:total].astype(np.int32),
            parents=parents[:total],
            node_index=index[:nodes].astype(np.int32),
            depths=depths,
        )


def fill(staging: StagingArrays, packed: Packed, plan: StepPlan, spare_slot: int) -> None:
    """Write the step into a block that has room for it; what is left over is padding."""
    rows, tokens = packed.rows, packed.tokens
    staging.slots[:rows] = packed.slots
    staging.slots[rows:] = spare_slot
    staging.kinds[:rows] = packed.kinds
    staging.kinds[rows:] = RowKind.PREFILL
    staging.starts[:rows] = packed.starts
    staging.starts[rows:] = 0
    staging.caps[:rows] = packed.caps
    staging.caps[rows:] = 0
    staging.cu_q[: rows + 1] = packed.cu_q
    staging.cu_q[rows + 1 :] = tokens
    staging.node_cu[: rows + 1] = packed.node_cu
    staging.node_cu[rows + 1 :] = packed.nodes
    staging.tokens[:tokens] = packed.token_ids
    staging.tokens[tokens:] = 0
    staging.parents[:tokens] = packed.parents
    staging.parents[tokens:] = -1
    staging.node_index[: packed.nodes] = packed.node_index
    staging.node_index[packed.nodes :] = max(0, tokens - 1)
    updates = len(plan.page_slots) // 4
    staging.update_slots[:updates] = i32(plan.page_slots)
    staging.update_columns[:updates] = i32(plan.page_indexes)
    staging.update_pages[:updates] = i32(plan.page_ids)
    staging.update_slots[updates:] = spare_slot
    staging.update_columns[updates:] = 0
    staging.update_pages[updates:] = 0
    for i, init in enumerate(plan.inits):
        staging.entry_slots[i] = init.slot
        staging.entry_lens[i] = init.cached_len
        staging.entry_outs[i] = len(init.output) // 4
    staging.counts[0] = updates
    staging.counts[1] = len(plan.inits)
