"""The drafts of a step as the host knows them: its own, and room for those of the device."""

from typing import NamedTuple

import numpy as np

from ...engine_core.ids import I32, RowKind, i32, u8
from ...engine_core.plan import HostDrafts, StepPlan


class DraftRoom(NamedTuple):
    """A :class:`HostDrafts`' arrays, None where no row has drafts.

    ``caps`` int32[R]: nodes of each row that the device drafts, None for none at all. They stand
    among the others as nodes 0 whose parent is the bonus token.
    """

    counts: I32 | None
    tokens: I32 | None
    parents: I32 | None
    caps: I32 | None


_NOTHING = DraftRoom(None, None, None, None)


def draft_room(plan: StepPlan, drafts: HostDrafts | None, on_device: bool) -> DraftRoom:
    """``on_device``: a drafter on the device fills the verify rows of steps that are not
    late-bound, and of others what their drafts say. Raises ValueError for room that cannot be.
    """
    if drafts is None:
        if not on_device:
            return _NOTHING
        caps = i32(plan.q_caps) - 1
        caps[u8(plan.kinds) != RowKind.VERIFY] = 0
        if not caps.any():
            return _NOTHING
        nothing = np.zeros(int(caps.sum()), dtype=np.int32)
        return DraftRoom(caps, nothing, nothing, caps)
    counts, tokens, parents = i32(drafts.counts), i32(drafts.tokens), i32(drafts.parents)
    caps = i32(drafts.device_caps)
    if not caps.any():
        return DraftRoom(counts, tokens, parents, None)
    if not on_device:
        raise ValueError("the drafts leave rows to the device, which has no drafter")
    if len(caps) != len(counts) or caps[counts > 0].any():
        raise ValueError("device_caps: one a row, and 0 for rows that have drafts")
    merged = counts + caps
    of_host = np.repeat(counts > 0, merged)
    if int(of_host.sum()) != len(tokens):
        raise ValueError(f"the rows take {of_host.sum()} drafts, {len(tokens)} were given")
    joined = np.zeros((2, len(of_host)), dtype=np.int32)
    joined[0, of_host], joined[1, of_host] = tokens, parents
    return DraftRoom(merged, joined[0], joined[1], caps)
