"""One step on the device: segments D, F and A over a staging block, without a look at the host."""

from typing import NamedTuple, cast

import torch

from ...engine_core.accept_rules import DRAWING, AcceptRule
from ...engine_core.plan import StepPlan
from ...kernels.force_accept_gpu import force_accept
from ...kernels.greedy_argmax_gpu import greedy_argmax
from ...kernels.kv_move_gpu import move_accepted
from ...kernels.logit_masks import FREE, mask_words
from ...kernels.logit_masks_gpu import mask_logits
from ...kernels.step_layout_gpu import lay_out
from ...kernels.threshold_sample import Thresholds
from ...kernels.verify_walk_gpu import verify_walk
from ..agreement import Ranks
from ..dependent_launch import launches_dependents
from ..forward_batch import ForwardBatch, RowGroup
from ..kv_pool import KVPool, copy_pages
from ..models import GpuModel
from ..speculative.device_drafter import DeviceDrafter, DraftRows, SurvivalDrafter, Verdict
from ..speculative.draft_law import DraftNoise
from ..speculative.simulate import EVERYTHING, SimulatedAcceptance, SimulatedSurvival, Survived
from ..speculative.target_features import run_target
from .edited_logits import edited_logits, note_emitted
from .ragged_step import Cut, RaggedStep
from .sampled_targets import Drawn, Tried, sample_targets
from .staging import StagingViews
from .state import DeviceState


class StepShape(NamedTuple):
    """What launches depend on. ``width``: most tokens that a row can emit.

    ``groups``: see ForwardBatch. ``nodes``: N, the first of ``node_index``; None where all T query
    tokens are nodes. ``moves``: accepted nodes may have to move. ``sampled``: some rows draw their
    token. ``edits``: some rows have penalties, a bias, a minimum length, bans or a grammar.
    ``verified``: T where rows are cut to verify lengths, so that the plan has more; None elsewhere.
    ``masked``: some rows have a grammar or custom processors, for which the host has a say between
    F and A.
    """

    width: int
    groups: tuple[RowGroup, ...]
    nodes: int | None
    moves: bool
    sampled: bool
    edits: bool
    verified: int | None = None
    masked: bool = False


class LaidOut(NamedTuple):
    """Segment D's answer; ``starts`` int32[R]: where the rows began in their sequences."""

    staging: StagingViews
    shape: StepShape
    out: torch.Tensor
    batch: ForwardBatch
    starts: torch.Tensor
    drawn: Drawn | None
    most: torch.Tensor | None
    survived: Survived | None


class Forwarded(NamedTuple):
    """Segment F's answer: raw logits [N, V], none on ranks that decide nothing, features and the
    hidden states [T, H]. ``edited`` float32[N, V]: the logits after ``edit``, if that came already.
    """

    logits: torch.Tensor | None
    features: torch.Tensor
    hidden: torch.Tensor
    edited: torch.Tensor | None = None


class StepMasks(NamedTuple):
    """Masks of a step's N nodes, see ``kernels/logit_masks``: ``places`` int32[N] and ``bits``
    int32[N, W], one behind the other in ``block``, which is written at once.
    """

    block: torch.Tensor
    places: torch.Tensor
    bits: torch.Tensor


class Choice(NamedTuple):
    """A forward pass's answer: the batch, its logits [N, V] (not edited), the targets int64[N].

    The latter two are empty on ranks that decide nothing. ``path`` int32[R, width]: the rows'
    nodes at which the emitted tokens were decided, -1 beyond. ``hidden``: all tokens' [T, H].
    """

    batch: ForwardBatch
    logits: torch.Tensor
    targets: torch.Tensor
    path: torch.Tensor
    hidden: torch.Tensor


class StepOutput(NamedTuple):
    """A step's output, one int32 block: by row, and ``tokens`` int32[R, width].

    ``proposed`` and ``depths`` int32[R] are those of the drafter on the device, None where none
    drafted. ``confidence`` float32[R, G] and ``trimmed`` int32[R]: see StepResult; None where the
    mode of ragged verify has no use for them.
    """

    accept_lens: torch.Tensor
    tokens: torch.Tensor
    proposed: torch.Tensor | None
    depths: torch.Tensor | None
    confidence: torch.Tensor | None = None
    trimmed: torch.Tensor | None = None


class DeviceStep:
    """Runs steps of one model on its KV pool and slot state; every call can be captured.

    ``accept_length``: force this mean accept length (for timing alone). ``ranks``: those that share
    the model, if there are several. The leading one alone ``decides`` targets and accept lengths;
    all of them draft and lay batches out, from state on which they agree. ``pools``: the KV pools
    that share the target's page numbers. ``rule``: by which sampled rows accept drafts, with its
    ``thresholds``. ``survival``: by which drafts are accepted, and are said to be, instead.
    """

    def __init__(
        self,
        model: GpuModel,
        kv: KVPool,
        state: DeviceState,
        accept_length: float | None = None,
        drafter: DeviceDrafter | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self.pools: tuple[KVPool, ...] = (kv,)
        self.drafter = drafter
        self.ragged: RaggedStep | None = None
        self.rule: AcceptRule = "coupled"
        self.thresholds: Thresholds | None = None
        self.survival: SimulatedSurvival | None = None
        self._ranks = ranks
        self.decides = ranks is None or ranks.leads
        self._pdl = launches_dependents(kv.data.device)
        self._simulated = None if accept_length is None else SimulatedAcceptance(accept_length)
        self.state = state

    @property
    def page_size(self) -> int:
        """Tokens of a KV page."""
        return self._kv.page_size

    def new_output(self, rows: int, width: int) -> torch.Tensor:
        """int32[N]: room for the output of a step of this shape (see ``split_output``)."""
        fields = 1
        if self.drafts(width):
            fields = 3
            if self.ragged is not None:
                fields += self.ragged.gamma + self.ragged.caps
        device = self.state.seq_lens.device
        return torch.empty(rows * (fields + width), dtype=torch.int32, device=device)

    def new_masks(self, nodes: int) -> StepMasks:
        """Room for the masks of as many nodes, which forbid nothing."""
        words = mask_words(self.state.edits.history.shape[1])
        block = torch.empty(
            nodes * (1 + words), dtype=torch.int32, device=self.state.seq_lens.device
        )
        places = block[:nodes].fill_(FREE)
        return StepMasks(block, places, block[nodes:].view(nodes, words))

    def split_output(self, out: torch.Tensor, rows: int, width: int) -> StepOutput:
        """Views of a step's output."""
        if not self.drafts(width):
            return StepOutput(out[:rows], out[rows:].view(rows, width), None, None)
        lens, proposed, depths = out[: 3 * rows].view(3, rows).unbind()
        ragged, rest = self.ragged, out[3 * rows :]
        if ragged is None:
            return StepOutput(lens, rest.view(rows, width), proposed, depths)
        sizes = [rows * width, rows * ragged.gamma, rows * ragged.caps]
        tokens, confidence, trimmed = torch.split(rest[: sum(sizes)], sizes)
        return StepOutput(
            lens,
            tokens.view(rows, width),
            proposed,
            depths,
            confidence.view(torch.float32).view(rows, ragged.gamma) if ragged.gamma else None,
            trimmed if ragged.caps else None,
        )

    def drafts(self, width: int) -> bool:
        """Whether the drafter has a part in steps of this width."""
        return self.drafter is not None and width > 1

    def enter(self, plan: StepPlan) -> None:
        """Take the requests that enter a slot, before the step itself is enqueued."""
        copy_pages(plan, self.pools)
        for init in plan.inits:
            self.state.enter(init)
            if self.drafter is not None:
                self.drafter.enter(init)

    def run(self, staging: StagingViews, shape: StepShape, out: torch.Tensor) -> Choice:
        """D, F and A, into ``out`` (see ``new_output``)."""
        laid = self.lay(staging, shape, out)
        return self.finish(laid, self.forward(laid))

    def lay(self, staging: StagingViews, shape: StepShape, out: torch.Tensor) -> LaidOut:
        """D: drafts, and the batch."""
        self.state.apply(staging)
        output = self.split_output(out, len(staging.slots), shape.width)
        drawn = self._propose(staging, output, shape.sampled)
        survived: Survived | None = None
        if self.survival is not None and self.drafts(shape.width):
            survived = self.survival.rows(staging.slots, self.state.seq_lens)
        staging, most = self._cut(staging, shape, output, survived)
        starts = torch.empty_like(staging.slots)
        batch = self._lay_out(staging, shape, starts)
        return LaidOut(staging, shape, out, batch, starts, drawn, most, survived)

    def forward(self, laid: LaidOut) -> Forwarded:
        """F: the target, to logits."""
        hidden, features = run_target(self._model, laid.batch, self._kv, self.drafter)
        if not self.decides:
            return Forwarded(None, features, hidden)
        nodes = hidden
        if laid.shape.nodes is not None:
            nodes = hidden.index_select(0, laid.batch.logits_index)
        return Forwarded(self._model.raw_logits(nodes), features, hidden)

    def edit(self, laid: LaidOut, found: Forwarded) -> Forwarded:
        """Penalties, biases, minimum lengths and bans, ahead of ``finish``, which then has none."""
        if found.logits is None:
            return found
        return found._replace(edited=self._edited(laid, found.logits))

    def finish(self, laid: LaidOut, found: Forwarded, masks: StepMasks | None = None) -> Choice:
        """A: processors and acceptance. ``masks``: of steps with grammars."""
        batch, logits = laid.batch, found.logits
        targets = batch.positions.new_empty(0)
        if logits is not None:
            edited = self._edited(laid, logits) if found.edited is None else found.edited
            targets = self._target(laid, edited, masks)
        path = self._accept(
            laid.staging, laid.shape, batch, targets, laid.starts, laid.out, found.features,
            laid.most, laid.survived,
        )  # fmt: skip
        if logits is None:
            logits = found.hidden.new_empty(0, 0)
        return Choice(batch, logits, targets, path, found.hidden)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[n, V] of hidden states [n, H]; only on the rank that decides."""
        return self._model.raw_logits(hidden).float()

    def _edited(self, laid: LaidOut, logits: torch.Tensor) -> torch.Tensor:
        """A copy float32[N, V] with edits, where rows have any; else the logits themselves."""
        if not laid.shape.edits:
            return logits
        return edited_logits(logits, laid.batch, laid.staging, self.state, laid.shape.width)

    def _target(self, laid: LaidOut, edited: torch.Tensor, masks: StepMasks | None) -> torch.Tensor:
        """Targets int64[N] from edited logits [N, V]."""
        shape, staging = laid.shape, laid.staging
        if masks is not None:
            mask_logits(edited, masks.places, masks.bits)
        if not shape.sampled:
            return greedy_argmax(edited, pdl=self._pdl)
        sampling, all_nodes = self.state.sampling, shape.nodes is None
        judged: Drawn | Tried | None = laid.drawn
        if self.thresholds is not None and shape.width > 1:
            judged = Tried(self.thresholds, staging.node_cu, staging.parents, laid.most)
        return sample_targets(edited, laid.batch, all_nodes, sampling, judged, self._pdl)

    def _cut(
        self,
        staging: StagingViews,
        shape: StepShape,
        output: StepOutput,
        survived: Survived | None,
    ) -> Cut:
        """What is verified of what was drafted."""
        if self.ragged is None or not self.drafts(shape.width):
            return Cut(staging, None)
        logits: torch.Tensor | None = None
        if survived is not None:
            logits = survived.logits
        elif self.ragged.gamma:
            logits = cast(SurvivalDrafter, self.drafter).confidence
        return self.ragged.cut(staging, output, logits, shape.verified)

    def _propose(self, staging: StagingViews, output: StepOutput, sampled: bool) -> Drawn | None:
        """Segment D of a drafter on the device: the drafts that the host left open."""
        if self.drafter is None or output.proposed is None or output.depths is None:
            return None
        noise: DraftNoise | None = None
        if self.rule in DRAWING and sampled:
            table = self.state.sampling
            noise = DraftNoise(table.temperatures, table.seeds, table.sampled)
        law = self.drafter.propose(
            DraftRows(
                staging.slots,
                staging.cu_q,
                staging.caps,
                self.state.seq_lens,
                staging.tokens,
                staging.parents,
                output.proposed,
                output.depths,
                noise,
            )
        )
        return None if law is None else Drawn(law, output.proposed, self.rule == "block")

    def _lay_out(
        self, staging: StagingViews, shape: StepShape, starts: torch.Tensor
    ) -> ForwardBatch:
        """Segment D of every step: tokens, positions and KV slots from the slots' state."""
        state, rows, tokens = self.state, len(staging.slots), len(staging.tokens)
        device = staging.slots.device

        def new(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        batch = ForwardBatch(
            input_ids=new(tokens, torch.int64),
            positions=new(tokens, torch.int64),
            kv_slots=new(tokens, torch.int64),
            cu_q=staging.cu_q,
            kv_lens=new(rows, torch.int32),
            page_table=state.page_table,
            tree_bits=new(tokens, torch.int64),
            is_tree=new(rows, torch.uint8),
            logits_index=staging.node_index[: shape.nodes],
            slots=staging.slots,
            groups=shape.groups,
        )
        lay_out(
            staging.slots,
            staging.kinds,
            staging.starts,
            staging.cu_q,
            staging.tokens,
            staging.parents,
            state.seq_lens,
            state.last_tokens,
            state.page_table,
            self._kv.page_size,
            input_ids=batch.input_ids,
            positions=batch.positions,
            kv_slots=batch.kv_slots,
            kv_lens=batch.kv_lens,
            tree_bits=batch.tree_bits,
            is_tree=batch.is_tree,
            starts_before=starts,
            longest=max((group.max_q for group in shape.groups), default=1),
        )
        return batch

    def _accept(
        self,
        staging: StagingViews,
        shape: StepShape,
        batch: ForwardBatch,
        targets: torch.Tensor,
        starts: torch.Tensor,
        out: torch.Tensor,
        features: torch.Tensor,
        most: torch.Tensor | None,
        survived: Survived | None,
    ) -> torch.Tensor:
        """Segment A: walk the trees, move accepted KV together and the slots' state on.

        ``most``: see ``Cut``. Returns the accepted nodes, int32[R, width].
        """
        output = self.split_output(out, len(staging.slots), shape.width)
        state, lens, tokens = self.state, output.accept_lens, output.tokens
        index = torch.empty_like(tokens)
        if self.decides:
            drafts, trimmed, simulated = batch.input_ids, output.trimmed, self._simulated
            if survived is not None:
                simulated, most, trimmed = EVERYTHING, survived.lens, torch.empty_like(lens)
            if simulated is not None and shape.width > 1:
                drafts = self._force(simulated, staging, batch, targets, starts)
            verify_walk(
                targets,
                drafts,
                staging.parents,
                staging.cu_q,
                staging.node_cu,
                staging.slots,
                starts,
                state.seq_lens,
                state.last_tokens,
                state.out_counts,
                accept_lens=lens,
                tokens=tokens,
                accept_idx=index,
                most=most,
                trimmed=None if most is None else trimmed,
            )
        if self._ranks is not None:
            # All that the walk writes; what else changes with a step follows from it.
            self._ranks.agree((state.seq_lens, state.last_tokens, state.out_counts, out, index))
        if shape.edits and self.decides:
            note_emitted(tokens, lens, staging.slots, state)
        if shape.moves:
            move_accepted(
                self._kv.data, staging.slots, starts, state.page_table, self._kv.page_size, lens,
                index,
            )  # fmt: skip
        if self.drafter is not None:
            self.drafter.align(
                Verdict(
                    staging.slots, lens, tokens, index, state.seq_lens, staging.kinds, starts,
                    batch, features,
                )
            )  # fmt: skip
        return index

    def _force(
        self,
        simulated: SimulatedAcceptance,
        staging: StagingViews,
        batch: ForwardBatch,
        targets: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        """int64[T] drafts whose walk accepts the drawn lengths; ``targets`` change with them."""
        drafts = torch.empty_like(batch.input_ids)
        force_accept(
            targets,
            batch.input_ids,
            batch.positions,
            batch.tree_bits,
            staging.parents,
            staging.cu_q,
            staging.node_cu,
            staging.slots,
            starts,
            floor=simulated.floor,
            threshold=simulated.threshold,
            tokens=drafts,
        )
        return drafts
