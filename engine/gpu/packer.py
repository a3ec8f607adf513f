"""From a step plan (and host drafts) to the packed input of a step on the device."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cython_ext.step_rows import resolve_rows
from ...engine_core.ids import I32, RowKind, i32, u8
from ...engine_core.plan import HostDrafts, StepPlan
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

    ``device_drafts``: a drafter on the device fills the verify rows of steps that are not
    late-bound, and of others what their HostDrafts say.
    """

    def __init__(self, max_slots: int, vocab_size: int, device_drafts: bool = False) -> None:
        self._device_drafts = device_drafts
        # The device knows the lengths and last tokens; here every slot is empty and ends in 0.
        self._no_state = np.zeros(max_slots, dtype=np.int32)
        self._vocab_size = vocab_size

    def pack(self, plan: StepPlan, drafts: HostDrafts | None) -> Packed:
        """Lay the step out. Raises ValueError if the plan or the drafts break their contract."""
        slots, kinds, given = i32(plan.slots), u8(plan.kinds), i32(plan.tokens)
        rows = len(slots)
        q_caps, verifies = i32(plan.q_caps), kinds == RowKind.VERIFY
        room = self._device_caps(plan, drafts, q_caps, verifies)
        counts, tokens, tree = _with_room(drafts, room)
        most = rows + len(given) + len(tokens)
        ids, index = np.empty(most, dtype=I64), np.empty(most, dtype=I64)
        parents = np.empty(most, dtype=np.int32)
        starts, q_lens, depths = (np.empty(rows, dtype=np.int32) for _ in range(3))
        cu_q, node_cu = (np.zeros(rows + 1, dtype=np.int32) for _ in range(2))
        total, nodes, branches = resolve_rows(
            slots,
            kinds,
            q_caps,
            i32(plan.starts),
            given,
            counts,
            tokens,
            tree,
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
        if room.any():
            open_rows = room > 0
            depths[open_rows] = 0
            parents[:total][np.repeat(open_rows, q_lens)] = -1
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
            caps=room,
            q_lens=q_lens,
            cu_q=cu_q,
            node_cu=node_cu,
            token_ids=ids[:total].astype(np.int32),
            parents=parents[:total],
            node_index=index[:nodes].astype(np.int32),
            depths=depths,
        )

    def _device_caps(
        self,
        plan: StepPlan,
        drafts: HostDrafts | None,
        q_caps: I32,
        verifies: npt.NDArray[np.bool_],
    ) -> I32:
        """int32[R]: nodes of each row that the device drafts."""
        if drafts is not None and drafts.device_caps:
            if not self._device_drafts:
                raise ValueError("the drafts leave rows to the device, which has no drafter")
            caps = i32(drafts.device_caps)
            if len(caps) != len(q_caps) or (caps[i32(drafts.counts) > 0] != 0).any():
                raise ValueError("device_caps: one a row, and 0 for rows that have drafts")
            return caps
        if self._device_drafts and not plan.late_bound:
            return np.where(verifies, q_caps - 1, 0).astype(np.int32)
        return np.zeros(len(q_caps), dtype=np.int32)


def _with_room(drafts: HostDrafts | None, room: I32) -> tuple[I32, I32, I32]:
    """The drafts' counts, tokens and parents, with nodes 0 for what the device fills in."""
    if drafts is None:
        nothing = np.zeros(int(room.sum()), dtype=np.int32)
        return room, nothing, nothing
    counts, tokens, parents = i32(drafts.counts), i32(drafts.tokens), i32(drafts.parents)
    if not room.any():
        return counts, tokens, parents
    merged = counts + room
    of_host = np.repeat(counts > 0, merged)
    joined = np.zeros((2, len(of_host)), dtype=np.int32)
    if int(of_host.sum()) != len(tokens):
        raise ValueError(f"the rows take {of_host.sum()} drafts, {len(tokens)} were given")
    joined[0, of_host], joined[1, of_host] = tokens, parents
    return merged, joined[0], joined[1]


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
