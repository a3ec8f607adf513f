"""Acceptance that is forced, for timing alone (--simulate-accept-length, --simulate-survival)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...engine_core.ids import I32
from ...kernels.force_accept import NO_TOKEN, UNIT
from ..step_buffers import I64, StepBuffers

_NODES = 64  # most nodes of a row


class SimulatedAcceptance:
    """Accept lengths floor(mean) and floor(mean) + 1 in the shares that give ``mean``.

    The bonus token counts. Rows without drafts stay as they are; a row's draft tree caps its
    length. A draw depends on the slot and the position alone: a run repeats itself. ``threshold``:
    of UNIT draws those that are longer than ``floor``.
    """

    def __init__(self, mean: float) -> None:
        self.floor = math.floor(mean)
        self.threshold = round((mean - self.floor) * UNIT)

    def lengths(self, slots: I32, positions: I32) -> I64:
        """int64[R] accept lengths of rows at ``positions`` int32[R], before the cap."""
        longer = (_mix(slots, positions) >> np.uint64(40)).astype(np.int64) < self.threshold
        return self.floor + longer.astype(np.int64)

    def force(
        self, targets: I64, slots: I32, branches: bool, buffers: StepBuffers
    ) -> tuple[I64, I64]:
        """Tokens int64[T] and targets int64[N] whose walk accepts just the drawn lengths.

        Along the path to a row's deepest node the target's tokens become the drafts'; all other
        drafts become a token that no target has. Unusable targets (below 0) stay unusable.
        """
        rows = len(slots)
        cu_q, node_cu = buffers.cu_q[: rows + 1], buffers.node_cu[: rows + 1]
        drafted = np.flatnonzero(np.diff(node_cu) > 1)
        if not len(drafted):
            return buffers.input_ids, targets
        starts = buffers.starts[:rows]
        lengths = self.lengths(slots[drafted], starts[drafted])
        node, level = _deepest(buffers.positions, starts, cu_q)
        node, level = node[drafted], level[drafted]
        first, first_node = cu_q[drafted].astype(np.int64), node_cu[drafted].astype(np.int64)
        tokens = np.full_like(buffers.input_ids, NO_TOKEN)
        targets = targets.copy()
        for _ in range(int(level.max())):
            parent = buffers.parents[first + node] if branches else node - 1
            chosen = np.flatnonzero((level >= 1) & (level < lengths))
            accepted = first[chosen] + node[chosen]
            tokens[accepted] = buffers.input_ids[accepted]
            before = first_node[chosen] + parent[chosen]
            usable = targets[before] >= 0
            targets[before[usable]] = tokens[accepted[usable]]
            node, level = np.maximum(parent, 0), level - 1
        return tokens, targets


class Survived(NamedTuple):
    """Of R rows: ``logits`` float32[R, G] of the drafts' chances, and ``lens`` int32[R], the tokens
    that a row emits at most."""

    logits: torch.Tensor
    lens: torch.Tensor


class SimulatedSurvival:
    """Chances of ``drafts`` drafts a row, of this ``mean``, and which of them hold.

    A row accepts all of its drafts that ``Survived.lens`` leaves it: see ``EVERYTHING``.
    ``simulate``: ``kernels/simulate_survival.py`` or its like.
    """

    def __init__(self, mean: float, drafts: int, simulate: Callable[..., None]) -> None:
        self._root = (1 - mean) / mean
        self._drafts = drafts
        self._simulate = simulate

    def rows(self, slots: torch.Tensor, seq_lens: torch.Tensor) -> Survived:
        """Of rows in ``slots`` int32[R], from the slots' state int32[S] before the step."""
        logits = torch.empty(len(slots), self._drafts, device=slots.device)
        lens = torch.empty_like(slots)
        self._simulate(slots, seq_lens, root=self._root, logits=logits, lens=lens)
        return Survived(logits, lens)


# Every draft of a row is accepted, up to what else caps it.
EVERYTHING = SimulatedAcceptance(_NODES)


def _mix(slots: I32, positions: I32) -> npt.NDArray[np.uint64]:
    """64 mixed bits of (slot, position): SplitMix64's output function."""
    word = slots.astype(np.uint64) << np.uint64(32) | positions.astype(np.uint64)
    word = word * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return word ^ word >> np.uint64(31)


def _deepest(positions: I64, starts: I32, cu_q: I32) -> tuple[I64, I64]:
    """Row-local index and depth of every row's deepest token, the first of equals."""
    q_lens = np.diff(cu_q)
    offsets = np.repeat(cu_q[:-1], q_lens)
    index = np.arange(cu_q[-1]) - offsets
    depth = positions[: cu_q[-1]] - np.repeat(starts, q_lens)
    # Rows of more than 64 tokens are chunks of prompts, whose answer nobody reads.
    best = np.maximum.reduceat(depth * _NODES + (_NODES - 1 - index % _NODES), cu_q[:-1])
    return _NODES - 1 - best % _NODES, best // _NODES
