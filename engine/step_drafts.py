"""A drafter in the process of a CPU's steps: between the core's arrays and the drafter's."""

import numpy as np
import torch

from ..engine_core.ids import I32, RowKind, i32, u8
from ..engine_core.plan import HostDrafts, StepPlan
from ..kernels.draft_rows_cpu import ask, give, spread
from .draft_buffers import DraftBuffers
from .forward_batch import ForwardBatch
from .future_map import FutureMap
from .sampling.features import Feature
from .sampling.node_drafts import NodeDrafts, node_drafts
from .speculative.device_drafter import DeviceDrafter, Verdict
from .speculative.draft_law import DraftLaw, DraftNoise
from .step_buffers import StepBuffers


class StepDrafts:
    """Lets ``drafter`` see rows that may have drafts alone, and steps only what it proposed.

    ``drawn``: sampled rows draw their drafts.
    """

    def __init__(self, drafter: DeviceDrafter, state: FutureMap, drawn: bool) -> None:
        self.drafter = drafter
        self._drawn = drawn
        self._law: DraftLaw | None = None
        self._state = state
        self._buffers = DraftBuffers()

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots."""
        for init in plan.inits:
            self.drafter.enter(init)

    def propose(self, plan: StepPlan) -> HostDrafts | None:
        """Drafts of a step's verify rows; None where no row may have any."""
        buffers, kinds, q_caps = self._buffers, u8(plan.kinds), i32(plan.q_caps)
        self._law = None
        buffers.reserve_rows(len(kinds))
        rows = ask(i32(plan.slots), kinds, q_caps, buffers.slots, buffers.caps, buffers.cu_q)
        if not rows:
            return None
        drafts = buffers.rows(rows, self._state.seq_lens)
        if self._drawn:
            drafts = drafts._replace(noise=self._noise(buffers.slots[:rows]))
        self._law = self.drafter.propose(drafts)
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

    def _noise(self, slots: I32) -> DraftNoise | None:
        table = self._state.sampling
        if not (table.features[slots] & int(Feature.SAMPLED)).any():
            return None
        return DraftNoise(table.temperatures, table.seeds, table.sampled)

    def held(
        self, plan: StepPlan, drafts: HostDrafts | None, batch: ForwardBatch, node_cu: I32
    ) -> NodeDrafts | None:
        """The drafts that the step's nodes are held against, where they were drawn.

        ``node_cu`` int32[R + 1].
        """
        if self._law is None or drafts is None:
            return None
        asked = (u8(plan.kinds) == RowKind.VERIFY) & (i32(plan.q_caps) > 1)
        row_of_node = np.repeat(np.arange(len(asked)), np.diff(node_cu))
        return node_drafts(
            self._law,
            batch.logits_index,
            torch.from_numpy(row_of_node),
            batch.cu_q,
            torch.from_numpy(i32(drafts.counts).copy()),
            torch.from_numpy(np.cumsum(asked) - 1),
            batch.input_ids,
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
