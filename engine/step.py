"""One step on the device: drafts to a batch (D), target forward to logits (F), acceptance (A)."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from ..cython_ext.batch_assembly import assemble
from ..cython_ext.step_rows import resolve_rows
from ..engine_core.accept_rules import AcceptRule
from ..engine_core.config import CoreConfig
from ..engine_core.draft_caps import no_drafts
from ..engine_core.grammar_compiler import GrammarCompiler
from ..engine_core.ids import I32, i32, u8
from ..engine_core.plan import HostDrafts, RowError, RowLogprobs, StepPlan, StepResult
from ..engine_core.processor_loader import ProcessorSet
from ..engine_core.ragged_verify import RaggedVerify
from ..engine_core.refusal import Refused
from ..kernels.simulate_survival import simulate_survival
from ..kernels.threshold_sample import Thresholds
from .forward_batch import ForwardBatch
from .future_map import FutureMap
from .kv_pool import KVPool, copy_pages
from .models import Model
from .row_errors import row_error
from .sampling.acceptance import Acceptance, TriedDrafts
from .sampling.choose import choose_targets
from .sampling.features import AFTERWARDS, Feature
from .sampling.logprobs import collect_logprobs
from .sampling.prompt_scores import Piece, score_prompts
from .sampling.slot_grammars import NodeMasks, RowTokens, SlotGrammars
from .sampling.slot_processors import ProcessorWork, SlotProcessors
from .sampling.thresholds import thresholds_of
from .sampling.tree_parents import tree_parents
from .speculative.device_drafter import DeviceDrafter, LoadedModel
from .speculative.drafter_maker import make_drafter
from .speculative.simulate import EVERYTHING, SimulatedAcceptance, SimulatedSurvival
from .speculative.target_features import run_target
from .speculative.verify import decide, settle
from .step_buffers import StepBuffers
from .step_drafts import StepDrafts

# Gives the other ranks what ``StepBuffers`` says was decided about R rows of N nodes.
ShareDecisions = Callable[[StepBuffers, int, int], None]


class Drafted(NamedTuple):
    """Segment D's answer: the batch, the rows' slots int32[R], whether any drafts branch."""

    batch: ForwardBatch
    slots: I32
    branches: bool


class StepRunner:
    """Runs step plans in order on one model, its KV pool and the slots' state.

    ``accept_length``: force this mean accept length (for timing alone). ``share`` is called with
    every decision before it is carried out. ``pools``: those that share the target's page numbers.
    """

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        state: FutureMap,
        vocab_size: int,
        accept_length: float | None = None,
        share: ShareDecisions | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self.pools: tuple[KVPool, ...] = (kv,)
        self._share = share
        self.state = state
        self._vocab_size = vocab_size
        self._buffers = StepBuffers()
        self._simulated = None if accept_length is None else SimulatedAcceptance(accept_length)
        self._drafts: StepDrafts | None = None
        self._thresholds: Thresholds | None = None
        self._grammars: SlotGrammars | None = None
        self._processors: SlotProcessors | None = None

    def obey(self, compiler: GrammarCompiler, forced: int | None = None) -> None:
        """Let requests have grammars; ``forced``: see SlotGrammars."""
        self._grammars = SlotGrammars(compiler, forced)

    def process_with(self, processors: ProcessorSet) -> None:
        """Let requests use these custom logits processors. Raises RefusedError."""
        self._processors = SlotProcessors(processors)

    def prepare(self, config: CoreConfig, draft: LoadedModel | None) -> DeviceDrafter | None:
        """Make the device's drafter, if ``config`` asks for one. Raises RefusedError."""
        self._thresholds = thresholds_of(config.engine)
        drafter = make_drafter(config, self.state.page_table, self._model, self._kv, draft)
        if drafter is not None:
            mean, survival = config.engine.simulate_survival, None
            if mean is not None:
                survival = SimulatedSurvival(mean, config.draft_width - 1, simulate_survival)
            self.draft_with(drafter, config.ragged, config.engine.accept_rule, survival)
        return drafter

    def draft_with(
        self,
        drafter: DeviceDrafter,
        ragged: RaggedVerify | None = None,
        rule: AcceptRule = "coupled",
        survival: SimulatedSurvival | None = None,
    ) -> None:
        """Let ``drafter`` fill the verify rows of steps that are not late-bound.

        ``ragged``: which of its drafts are verified; None for all. ``rule``, ``survival``: see
        StepDrafts.
        """
        self._drafts = StepDrafts(drafter, self.state, ragged, rule, survival)

    def reset(self) -> None:
        """Forget every slot; only while idle."""
        self.state.reset()
        if self._drafts is not None:
            self._drafts.drafter.reset()
        if self._grammars is not None:
            self._grammars.reset()
        if self._processors is not None:
            self._processors.reset()

    def run(self, plan: StepPlan, drafts: HostDrafts | None) -> StepResult:
        """Run one step. Raises ValueError if the plan or the drafts break their contract."""
        self.state.apply(plan)
        copy_pages(plan, self.pools)
        illegal, forced = 0, b""
        if self._grammars is not None:
            self._grammars.enter(plan)
        if self._processors is not None:
            self._processors.enter(plan)
        if self._drafts is not None:
            self._drafts.enter(plan)
            drafts = self._drafts.late(drafts) if plan.late_bound else self._drafts.propose(plan)
        # Leaving out a drawn draft for what it is would shift the distribution.
        free = self._drafts is None or not self._drafts.fixed
        if self._grammars is not None and free and self._grammars.concern(i32(plan.slots)):
            sifted = self._grammars.sift(plan, drafts or no_drafts(plan))
            if drafts is not None or sifted.forced:
                drafts, illegal, forced = sifted
        drafter = None if self._drafts is None else self._drafts.drafter
        drafted = self._draft(plan, drafts)
        hidden, features = run_target(self._model, drafted.batch, self._kv, drafter)
        pieces = self.state.scores.take(plan)
        result = self._decide(plan, drafts, drafted, hidden)
        if pieces:
            scores = self._score(pieces, hidden)
            result = msgspec.structs.replace(result, prompt_logprobs=scores)
        if self._drafts is not None:
            self._drafts.align(plan, drafted.slots, drafted.batch, features, self._buffers)
        if illegal or forced:
            result = msgspec.structs.replace(result, illegal=illegal, forced=forced)
        return result

    def _draft(self, plan: StepPlan, drafts: HostDrafts | None) -> Drafted:
        """Segment D: resolve rows against the slots' state and lay out the ragged batch."""
        buffers, state = self._buffers, self.state
        slots, tokens = i32(plan.slots), i32(plan.tokens)
        rows = len(slots)
        most = rows + len(tokens) + (0 if drafts is None else len(drafts.tokens) // 4)
        buffers.reserve(rows, most)
        total, nodes, branches = resolve_rows(
            slots,
            u8(plan.kinds),
            i32(plan.q_caps),
            i32(plan.starts),
            tokens,
            None if drafts is None else i32(drafts.counts),
            None if drafts is None else i32(drafts.tokens),
            None if drafts is None else i32(drafts.parents),
            state.host.seq_lens,
            state.host.last_tokens,
            self._vocab_size,
            buffers.starts,
            buffers.q_lens,
            buffers.input_ids,
            buffers.parents,
            buffers.node_cu,
            buffers.logits_index,
            buffers.depths,
        )
        assemble(
            slots,
            buffers.q_lens[:rows],
            buffers.starts[:rows],
            buffers.parents[:total] if branches else None,
            state.host.page_table,
            self._kv.page_size,
            buffers.positions,
            buffers.kv_slots,
            buffers.row_of_token,
            buffers.cu_q,
            buffers.kv_lens,
            buffers.tree_bits,
            buffers.is_tree,
        )
        batch = buffers.batch(rows, total, nodes, self._pages_of(slots))
        return Drafted(batch, slots, branches)

    def _pages_of(self, slots: I32) -> torch.Tensor:
        """int32[R, P] page-table rows, as wide as the longest row needs."""
        rows = len(slots)
        if rows == 1:
            return self.state.slot_pages[int(slots[0])]
        longest = int(self._buffers.kv_lens[:rows].max())
        width = -(-longest // self._kv.page_size)
        return torch.from_numpy(self.state.host.page_table[slots, :width])

    def _logits(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Float32[N, V] logits of the step's nodes, the end of segment F."""
        nodes = batch.logits_index.shape[0]
        if nodes == 0:
            return hidden.new_empty(0, self._vocab_size, dtype=torch.float32)
        if nodes != hidden.shape[0]:
            hidden = hidden.index_select(0, batch.logits_index)
        return self._model.logits(hidden)

    def _decide(
        self, plan: StepPlan, drafts: HostDrafts | None, drafted: Drafted, hidden: torch.Tensor
    ) -> StepResult:
        """Segment A: processors, acceptance, KV compaction, the slots' new state."""
        buffers, state = self._buffers, self.state
        logits = self._logits(drafted.batch, hidden)
        slots, rows = drafted.slots, len(drafted.slots)
        node_cu = buffers.node_cu[: rows + 1]
        masks: NodeMasks | None = None
        if self._grammars is not None and self._grammars.concern(slots):
            masks = self._grammars.masks(slots, plan.kinds, self._row_tokens(drafted.branches))
        work: ProcessorWork | None = None
        if self._processors is not None and self._processors.concern(slots):
            work = self._processors.work(slots, plan.kinds, self._row_tokens(drafted.branches))
        most = None if self._drafts is None else self._drafts.most
        acceptance: Acceptance | None = None
        if self._thresholds is not None:
            acceptance = self._tried(self._thresholds, drafted, node_cu, most)
        elif self._drafts is not None:
            acceptance = self._drafts.held(plan, drafts, drafted.batch, node_cu)
        targets = choose_targets(
            logits, drafted.batch, slots, node_cu, state.sampling, state.edits, state.out_counts,
            acceptance, masks, work,
        )  # fmt: skip
        simulated = self._simulated
        if self._drafts is not None and self._drafts.survived is not None:
            simulated, most = EVERYTHING, self._drafts.survived
        total, scattered = decide(targets, slots, drafted.branches, buffers, simulated, most)
        if self._share is not None:
            self._share(buffers, rows, int(node_cu[rows]))
        settle(total, scattered, slots, buffers, state, self._kv)
        if self._grammars is not None:
            self._grammars.advance(slots, buffers.accept_cu, buffers.emitted)
        if self._processors is not None:
            self._processors.advance(slots, buffers.accept_cu, buffers.emitted)
        accept_lens = buffers.accept_lens[:rows]
        logprobs: tuple[RowLogprobs, ...] = ()
        if state.sampling.featured and (state.sampling.features[slots] & AFTERWARDS).any():
            self._count_emitted(slots)
            logprobs = collect_logprobs(
                logits,
                slots,
                node_cu,
                buffers.accept_cu[: rows + 1],
                buffers.accept_idx,
                buffers.emitted,
                state.sampling,
            )
        errors: tuple[RowError, ...] = ()
        if not accept_lens.all():
            bad = np.flatnonzero((accept_lens == 0) & (np.diff(node_cu) > 0)).tolist()
            errors = tuple(row_error(row, self._refusal(row, int(slots[row]), work)) for row in bad)
        return self._result(plan, drafts, drafted, total, logprobs, errors)

    def _row_tokens(self, branches: bool) -> RowTokens:
        """The tokens of the step's rows as it was laid out."""
        buffers, cu_q, cu = self._buffers, self._buffers.cu_q, self._buffers.node_cu
        parents = buffers.parents if branches else None
        return RowTokens(cu_q[:-1], cu_q[1:], cu[:-1], cu[1:], buffers.input_ids, parents)

    def _tried(
        self, thresholds: Thresholds, drafted: Drafted, node_cu: I32, most: I32 | None
    ) -> TriedDrafts | None:
        """The drafts that nodes try, where rows have any."""
        batch, buffers = drafted.batch, self._buffers
        nodes, rows = len(batch.logits_index), len(drafted.slots)
        if nodes <= rows:
            return None
        parents = tree_parents(
            batch.logits_index,
            torch.from_numpy(np.repeat(np.arange(rows), np.diff(node_cu))),
            batch.cu_q,
            torch.from_numpy(node_cu),
            torch.from_numpy(buffers.parents) if drafted.branches else None,
            batch.positions,
            None if most is None else torch.from_numpy(most),
        )
        return TriedDrafts(batch.input_ids[batch.logits_index], parents, thresholds)

    def _result(
        self,
        plan: StepPlan,
        drafts: HostDrafts | None,
        drafted: Drafted,
        total: int,
        logprobs: tuple[RowLogprobs, ...] = (),
        errors: tuple[RowError, ...] = (),
    ) -> StepResult:
        buffers, rows = self._buffers, len(drafted.slots)
        proposed = np.zeros(rows, dtype=np.int32) if drafts is None else i32(drafts.counts)
        depths = buffers.depths[:rows]
        confidence = trimmed = b""
        if self._drafts is not None:
            confidence, most = self._drafts.confidence, self._drafts.most
            if most is not None:
                proposed, depths = np.minimum(proposed, most - 1), np.minimum(depths, most - 1)
                trimmed = buffers.trimmed[:rows].tobytes()
        return StepResult(
            step=plan.step,
            accept_lens=buffers.accept_lens[:rows].tobytes(),
            tokens=buffers.emitted[:total].tobytes(),
            proposed=proposed.tobytes(),
            depths=depths.tobytes(),
            logprobs=logprobs,
            errors=errors,
            batch_tokens=int(drafted.batch.input_ids.shape[0]),
            confidence=confidence,
            trimmed=trimmed,
        )

    def _refusal(self, row: int, slot: int, work: ProcessorWork | None) -> Refused | None:
        """Why the row's request cannot go on, where a processor or its grammar is to blame."""
        refused = None if work is None else work.refusal(row)
        if refused is not None or self._grammars is None:
            return refused
        return self._grammars.refusal(slot)

    def _score(self, pieces: list[Piece], hidden: torch.Tensor) -> tuple[RowLogprobs, ...]:
        """Log-probabilities of prompt tokens, from the hidden states [T, H]."""
        return score_prompts(pieces, self._buffers.cu_q, hidden, self._model.logits)

    def _count_emitted(self, slots: I32) -> None:
        """Add what rows with penalties emitted to their token counts, with bans to their tails."""
        penalized = (self.state.sampling.features[slots] & int(Feature.PENALTIES)) != 0
        buffers, rows = self._buffers, len(slots)
        self.state.edits.emitted(slots, buffers.accept_cu[: rows + 1], buffers.emitted)
        row_of = np.repeat(np.arange(len(slots)), buffers.accept_lens[:rows])
        chosen = np.flatnonzero(penalized[row_of])
        device = self.state.seq_lens.device
        self.state.edits.counts.add(
            torch.from_numpy(slots[row_of[chosen]].astype(np.int64)).to(device),
            torch.from_numpy(buffers.emitted[chosen].astype(np.int64)).to(device),
        )
