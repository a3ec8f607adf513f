"""A drafter in the process of a CPU's steps: between the core's arrays and the drafter's."""

from typing import cast

import numpy as np
import torch

from ..engine_core.accept_rules import DRAWING, AcceptRule
from ..engine_core.draft_caps import device_caps
from ..engine_core.ids import I32, i32, u8
from ..engine_core.plan import HostDrafts, StepPlan
from ..engine_core.ragged_verify import RaggedVerify
from ..kernels.draft_rows_cpu import ask, give, spread
from .draft_buffers import DraftBuffers
from .forward_batch import ForwardBatch
from .future_map import FutureMap
from .ragged_rows import RaggedRows
from .sampling.acceptance import DrawnDrafts
from .sampling.features import Feature
from .sampling.node_drafts import node_drafts
from .speculative.device_drafter import DeviceDrafter, DraftRows, SurvivalDrafter, Verdict
from .speculative.draft_law import DraftLaw, DraftNoise
from .speculative.simulate import SimulatedSurvival, Survived
from .step_buffers import StepBuffers


class StepDrafts:
    """Lets ``drafter`` see rows that may have drafts alone, and steps only what it proposed.

    ``ragged``: which of its drafts are verified; None for all. ``rule``: by which drafts are
    accepted; where it is one of both models, sampled rows draw theirs. ``survival``: by which they
    are accepted, and are said to be, instead.
    """

    def __init__(
        self,
        drafter: DeviceDrafter,
        state: FutureMap,
        ragged: RaggedVerify | None = None,
        rule: AcceptRule = "coupled",
        survival: SimulatedSurvival | None = None,
    ) -> None:
        self.drafter = drafter
        planned = ragged is not None and ragged.planned
        self._ragged = RaggedRows(ragged) if ragged is not None and planned else None
        self._rule = rule
        self._law: DraftLaw | None = None
        self._survival = survival
        self.survived: I32 | None = None  # int32[R]: tokens that simulated survival lets a row emit
        # Of the latest step: see StepResult, and the tokens that rows int32[R] emit at most.
        self.confidence = b""
        self.most: I32 | None = None
        self._state = state
        self._buffers = DraftBuffers()

    @property
    def fixed(self) -> bool:
        """Whether the latest drafts must stay: they were drawn, or have a confidence each."""
        return self._law is not None or bool(self.confidence)

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots."""
        for init in plan.inits:
            self.drafter.enter(init)

    def late(self, drafts: HostDrafts | None) -> HostDrafts | None:
        """The host's drafts of a late-bound step, which are verified as they are."""
        self.confidence, self.most, self.survived, self._law = b"", None, None, None
        return drafts

    def propose(self, plan: StepPlan) -> HostDrafts | None:
        """Drafts of a step's verify rows; None where no row may have any."""
        self.confidence, self.most = b"", None
        buffers, kinds, q_caps = self._buffers, u8(plan.kinds), device_caps(plan) + 1
        self._law = self.survived = None
        buffers.reserve_rows(len(kinds))
        rows = ask(i32(plan.slots), kinds, q_caps, buffers.slots, buffers.caps, buffers.cu_q)
        if plan.accept_caps:
            caps = i32(plan.accept_caps)
            self.most = np.ones(len(kinds), dtype=np.int32)
            self.most[: len(caps)] += caps
        if not rows:
            return None
        drafts = buffers.rows(rows, self._state.seq_lens)
        if self._rule in DRAWING:
            drafts = drafts._replace(noise=self._noise(buffers.slots[:rows]))
        self._law = self.drafter.propose(drafts)
        survived: Survived | None = None
        if self._survival is not None:
            survived = self._survival.rows(drafts.slots, drafts.seq_lens)
            self.survived = self._spread(plan, survived.lens)
        if self._ragged is not None:
            self._cut(self._ragged, plan, drafts, survived)
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

    def _cut(
        self, ragged: RaggedRows, plan: StepPlan, drafts: DraftRows, survived: Survived | None
    ) -> None:
        """Leave the rows what their confidence earns them of the step's budget."""
        if survived is None:
            logits = cast(SurvivalDrafter, self.drafter).confidence
        else:
            logits = survived.logits
        cut = ragged.cut(drafts, logits, plan.budget)
        self.confidence = cut.confidence.numpy().tobytes()
        if ragged.mode == "compact":
            torch.minimum(drafts.proposed, cut.lens - 1, out=drafts.proposed)
            return
        self.most = self._spread(plan, cut.lens)

    def _spread(self, plan: StepPlan, lens: torch.Tensor) -> I32:
        """int32[R]: the lengths of rows that drafted, 1 for all others."""
        drafting = device_caps(plan) > 0
        all_lens = np.ones(len(drafting), dtype=np.int32)
        all_lens[drafting] = lens.numpy()
        return all_lens

    def _noise(self, slots: I32) -> DraftNoise | None:
        table = self._state.sampling
        if not (table.features[slots] & int(Feature.SAMPLED)).any():
            return None
        return DraftNoise(table.temperatures, table.seeds, table.sampled)

    def held(
        self, plan: StepPlan, drafts: HostDrafts | None, batch: ForwardBatch, node_cu: I32
    ) -> DrawnDrafts | None:
        """The drafts that the step's nodes are held against, where they were drawn: none beyond a
        cap. ``node_cu`` int32[R + 1].
        """
        if self._law is None or drafts is None:
            return None
        asked = device_caps(plan) > 0
        counts = i32(drafts.counts)
        counts = counts.copy() if self.most is None else np.minimum(counts, self.most - 1)
        row_of_node = np.repeat(np.arange(len(asked)), np.diff(node_cu))
        held = node_drafts(
            self._law,
            batch.logits_index,
            torch.from_numpy(row_of_node),
            batch.cu_q,
            torch.from_numpy(counts),
            torch.from_numpy(np.cumsum(asked) - 1),
            batch.input_ids,
        )
        return DrawnDrafts(held, self._rule == "block")

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
