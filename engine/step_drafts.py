"""A drafter in the process of a CPU's steps: between the core's arrays and the drafter's."""

import numpy as np
import torch

from ..engine_core.ids import I32, RowKind, i32, u8
from ..engine_core.plan import HostDrafts, StepPlan
from .forward_batch import ForwardBatch
from .future_map import FutureMap
from .speculative.device_drafter import DeviceDrafter, DraftRows, Verdict
from .step_buffers import StepBuffers


class StepDrafts:
    """Lets ``drafter`` see rows that may have drafts alone, and steps only what it proposed."""

    def __init__(self, drafter: DeviceDrafter, state: FutureMap) -> None:
        self.drafter = drafter
        self._state = state

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots."""
        for init in plan.inits:
            self.drafter.enter(init)

    def propose(self, plan: StepPlan) -> HostDrafts | None:
        """Drafts of a step's verify rows; None where no row may have any."""
        caps = np.where(u8(plan.kinds) == RowKind.VERIFY, i32(plan.q_caps) - 1, 0)
        chosen = np.flatnonzero(caps)
        if not len(chosen):
            return None
        wanted = caps[chosen].astype(np.int32)
        cu = np.zeros(len(chosen) + 1, dtype=np.int32)
        np.cumsum(wanted + 1, out=cu[1:])
        tokens, parents = np.zeros((2, cu[-1]), dtype=np.int32)
        proposed, depths = np.zeros((2, len(chosen)), dtype=np.int32)
        self.drafter.propose(
            DraftRows(
                torch.from_numpy(i32(plan.slots)[chosen]),
                torch.from_numpy(cu),
                torch.from_numpy(wanted),
                self._state.seq_lens,
                torch.from_numpy(tokens),
                torch.from_numpy(parents),
                torch.from_numpy(proposed),
                torch.from_numpy(depths),
            )
        )
        node = np.arange(cu[-1]) - np.repeat(cu[:-1], wanted + 1)
        kept = (node > 0) & (node <= np.repeat(proposed, wanted + 1))
        counts = np.zeros(len(caps), dtype=np.int32)
        counts[chosen] = proposed
        return HostDrafts(
            plan.step, counts.tobytes(), tokens[kept].tobytes(), parents[kept].tobytes()
        )

    def align(
        self,
        plan: StepPlan,
        slots: I32,
        batch: ForwardBatch,
        features: torch.Tensor,
        buffers: StepBuffers,
    ) -> None:
        """Tell the drafter what ``buffers`` say was decided."""
        rows = len(slots)
        lens = buffers.accept_lens[:rows]
        tokens, path = _grids(lens, buffers.emitted, buffers.accept_idx)
        self.drafter.align(
            Verdict(
                torch.from_numpy(slots.copy()),
                torch.from_numpy(lens),
                tokens,
                path,
                self._state.seq_lens,
                torch.from_numpy(u8(plan.kinds).copy()),
                torch.from_numpy(buffers.starts[:rows]),
                batch,
                features,
            )
        )


def _grids(lens: I32, *runs: I32) -> list[torch.Tensor]:
    """int32[R, W] of each argument: runs of ``lens`` int32[R] values side by side, then -1."""
    width = max(1, int(lens.max(initial=0)))
    filled = np.arange(width) < lens[:, None]
    total = int(lens.sum())
    grids: list[torch.Tensor] = []
    for values in runs:
        grid = np.full((len(lens), width), -1, dtype=np.int32)
        grid[filled] = values[:total]
        grids.append(torch.from_numpy(grid))
    return grids
