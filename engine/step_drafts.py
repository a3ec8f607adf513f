"""A drafter in the process of a CPU's steps: between the core's arrays and the drafter's."""

import torch

from ..engine_core.ids import I32, i32, u8
from ..engine_core.plan import HostDrafts, StepPlan
from ..kernels.draft_rows_cpu import ask, give, spread
from .draft_buffers import DraftBuffers
from .forward_batch import ForwardBatch
from .future_map import FutureMap
from .speculative.device_drafter import DeviceDrafter, Verdict
from .step_buffers import StepBuffers


class StepDrafts:
    """Lets ``drafter`` see rows that may have drafts alone, and steps only what it proposed."""

    def __init__(self, drafter: DeviceDrafter, state: FutureMap) -> None:
        self.drafter = drafter
        self._state = state
        self._buffers = DraftBuffers()

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots."""
        for init in plan.inits:
            self.drafter.enter(init)

    def propose(self, plan: StepPlan) -> HostDrafts | None:
        """Drafts of a step's verify rows; None where no row may have any."""
        buffers, kinds, q_caps = self._buffers, u8(plan.kinds), i32(plan.q_caps)
        buffers.reserve_rows(len(kinds))
        rows = ask(i32(plan.slots), kinds, q_caps, buffers.slots, buffers.caps, buffers.cu_q)
        if not rows:
            return None
        drafts = buffers.rows(rows, self._state.seq_lens)
        self.drafter.propose(drafts)
        tokens, parents = buffers.tokens, buffers.parents
        kept = give(
            kinds, q_caps, buffers.cu_q[: rows + 1], buffers.proposed, tokens, parents,
            buffers.counts,
        )  # fmt: skip
        return HostDrafts(
            plan.step,
            buffers.counts[: len(kinds)].tobytes(),
            tokens[:kept].tobytes(),
            parents[:kept].tobytes(),
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
        ours, lens = self._buffers, buffers.accept_lens[:rows]
        ours.reserve_rows(rows)
        ours.all_slots[:rows] = slots
        ours.kinds[:rows] = u8(plan.kinds)
        tokens, path, grids = ours.grids(rows, max(1, int(lens.max(initial=0))))
        spread(lens, buffers.emitted, tokens)
        spread(lens, buffers.accept_idx, path)
        accept_lens, starts = buffers.decided(rows)
        self.drafter.align(
            Verdict(
                grids.slots,
                accept_lens,
                grids.tokens,
                grids.path,
                self._state.seq_lens,
                grids.kinds,
                starts,
                batch,
                features,
            )
        )
