"""Runs step plans on a GPU: packs, launches, and reads results when they are wanted."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...cython_ext.packed_rows import PackedRows
from ...engine_core.accept_rules import DRAWING
from ...engine_core.ids import I32, i32
from ...engine_core.plan import HostDrafts, RowError, RowLogprobs, StepPlan, StepResult
from ...engine_core.refusal import Refused
from ...kernels.logit_masks import FREE
from ...kernels.logit_masks_gpu import mask_logits
from ..row_errors import row_error
from ..sampling.features import EDITS, Feature
from ..sampling.logprobs import collect_logprobs
from ..sampling.prompt_scores import Piece, score_prompts
from ..sampling.slot_processors import ProcessorWork, SlotProcessors
from .device_step import Choice, DeviceStep, Forwarded, StepMasks
from .grammar_steps import GrammarSteps
from .graphs import StepGraphs
from .launched import Launched, Output, read_answer
from .marks import Mark, MarkRing
from .packer import StepPacker, fill, prefill_of
from .pinned_ring import RING, PinnedRing
from .rows_to_come import MaskWait, RowFetch, RowsToCome
from .staging import field_lengths, split_device
from .tier_shapes import exact_shape, exact_staging, tier_shape, tier_staging
from .tiers import Tier, Tiers

_LEAST_S = 1e-7  # times are positive

_NO_LOGPROBS: tuple[RowLogprobs, ...] = ()
_SAMPLED, _LOGPROBS = int(Feature.SAMPLED), int(Feature.LOGPROBS)
_GRAMMAR, _PROCESSORS = int(Feature.GRAMMAR), int(Feature.PROCESSORS)
_HOST = _GRAMMAR | _PROCESSORS  # for which the host has a say between F and A
_EDITED = EDITS | _HOST


class Scored(NamedTuple):
    """Log-probabilities of what rows emitted, and of prompt tokens; what custom processors did."""

    logprobs: tuple[RowLogprobs, ...]
    scores: tuple[RowLogprobs, ...]
    work: ProcessorWork | None = None


_NO_SCORES = Scored(_NO_LOGPROBS, _NO_LOGPROBS)


class Started(NamedTuple):
    """A step whose target runs. ``finish`` enqueues the rest, once, and gives log-probabilities.

    ``mask_wait``: between the two, where the host has a say.
    """

    output: Output
    finish: Callable[[], Scored]
    mask_wait: MaskWait | None = None


class GpuStepRunner:
    """Launches steps in order on one stream without waiting for any of them.

    For reports: ``decode_steps`` (of verify rows alone), ``prefill_steps`` (all others) and those
    of either that replayed a graph count what was launched; ``gap_ns`` is the time between one
    step's end and the next one's begin on the device, ``mask_wait_ns`` that within steps where it
    waited for the host: for grammars' masks, or for custom processors to be called.
    ``wait`` waits until the device has passed a step's end. ``aligns``: a budget takes what its
    graph would be padded with. ``grammars``, ``processors``: of the slots' requests; a step with
    such rows ends when the one before was collected, and has the ``masked`` tiers, as rows without
    a drafter may have drafts then (``tiers`` if not given).
    """

    def __init__(
        self,
        step: DeviceStep,
        packer: StepPacker,
        tiers: Tiers,
        graphs: StepGraphs | None,
        device: torch.device,
        wait: Callable[[Mark], None] | None = None,
        aligns: bool = False,
        grammars: GrammarSteps | None = None,
        masked: Tiers | None = None,
        processors: SlotProcessors | None = None,
    ) -> None:
        self._step = step
        self._aligns = aligns
        self._wait = wait or _synchronize
        self._packer = packer
        self._tiers = tiers
        self._masked_tiers = masked or tiers
        self._graphs = graphs
        self._device = device
        pinned = device.type == "cuda"
        self._inputs, self._outputs = PinnedRing(pinned), PinnedRing(pinned)
        self._begins, self._ends = MarkRing(device, RING), MarkRing(device, RING)
        self.decode_steps = self.replays = self.prefill_steps = self.prefill_replays = 0
        self.gap_ns = self.mask_wait_ns = 0
        self._last_done: Mark | None = None
        self._replayed: set[Tier] = set()
        self._grammars = grammars
        self._processors = processors
        self._has_say = grammars is not None or processors is not None
        self._rows = RowFetch(device)
        self._open = 0  # steps launched and not collected
        self._later: Callable[[], None] | None = None  # ends the newest of them

    @property
    def _compacts(self) -> bool:
        """Whether rows are cut to verify lengths."""
        return self._step.ragged is not None and self._step.ragged.compacts

    @property
    def steps(self) -> int:
        """Steps of either kind."""
        return self.decode_steps + self.prefill_steps

    def capture(self) -> None:
        """Capture every tier of verify rows without edits, and greedy ones with prefill rows.

        Requests that sample are the rule, edits are not. The largest come first.
        """
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.capture_all(self._tiers.mixed(sampled=False))
                self._graphs.capture_all(self._tiers.all(sampled=False))
                self._graphs.capture_all(self._tiers.all(sampled=True))

    def launch(self, plan: StepPlan, drafts: HostDrafts | None, wait_ns: int) -> Launched:
        """Enqueue a step. Raises ValueError if the plan or the drafts break their contract."""
        illegal, forced = 0, b""
        self._step.enter(plan)
        if self._grammars is not None:
            self._grammars.enter(plan)
            fixed = drafts is None and self._fixed(plan)
            on_device = self._step.drafter is not None
            drafts, illegal, forced = self._grammars.start(plan, drafts, on_device, fixed)
        if self._processors is not None:
            self._processors.enter(plan)
        packed = self._packer.pack(plan, drafts)
        features = self._features(packed)
        began = self._begins.take()
        pieces = self._step.state.scores.take(plan)
        started = None if pieces else self._replay(plan, packed, features, began)
        self._count(packed, started is not None)
        if started is None:
            started = self._run(plan, packed, features, began, pieces)
        output, verified = started.output, self._verified(plan, packed)
        host, done = self._outputs.take(output.out.numel()), self._ends.take()
        launched = Launched(
            plan, packed, host.array, output.rows, output.width, output.gap, began, done, (), (),
            wait_ns, packed.tokens if verified is None else verified, illegal, forced,
            started.mask_wait,
        )  # fmt: skip

        def finish() -> None:
            launched.logprobs, launched.prompt_logprobs, launched.work = started.finish()
            host.tensor.copy_(output.out, non_blocking=True)
            done.record()

        if features & _HOST and self._open:
            self._later = finish
        else:
            finish()
        self._open += 1
        return launched

    def waits(self, plan: StepPlan) -> bool:
        """Whether a step that is not late-bound should be launched only when the one in flight is
        collected: grammars may have drafts for it then.
        """
        if self._grammars is None or not self._open or self._fixed(plan):
            return False
        return self._grammars.waits(plan)

    def _fixed(self, plan: StepPlan) -> bool:
        """Whether drafts of the device must stay: they are drawn, or have a confidence each."""
        step = self._step
        if step.drafter is None:
            return False
        if step.ragged is not None and step.ragged.gamma:
            return True
        features = step.state.sampling.features[i32(plan.slots)]
        return step.rule in DRAWING and bool((features & _SAMPLED).any())

    def _verified(self, plan: StepPlan, packed: PackedRows) -> int | None:
        """Query tokens that are left of a step whose rows are cut, at most; None for others."""
        drafts = packed.device_drafts
        if not drafts or not self._compacts:
            return None
        spent = drafts if plan.budget < 0 else min(plan.budget, drafts)
        return packed.tokens - drafts + spent

    def _count(self, packed: PackedRows, replayed: bool) -> None:
        if packed.decode_only:
            self.decode_steps += 1
            self.replays += replayed
        else:
            self.prefill_steps += 1
            self.prefill_replays += replayed

    def result(self, launched: Launched) -> StepResult:
        """Wait for a step and read what it decided."""
        self._wait(launched.done)
        if self._last_done is not None:
            self.gap_ns += int(self._last_done.elapsed_time(launched.began) * 1e6)
        self._last_done = launched.done
        mask_wait_ns = launched.mask_wait_ns()
        self.mask_wait_ns += mask_wait_ns
        packed, answer = launched.packed, read_answer(self._step, launched)
        errors: tuple[RowError, ...] = ()
        if answer.silent:
            errors = tuple(row_error(row, self._refusal(launched, row)) for row in answer.silent)
        self._open -= 1
        if self._has_say:
            self._pass_on(launched.plan.step, packed, i32(answer.lens), i32(answer.tokens))
        return StepResult(
            step=launched.plan.step,
            accept_lens=answer.lens,
            tokens=answer.tokens,
            proposed=answer.proposed,
            depths=answer.depths,
            logprobs=launched.logprobs,
            prompt_logprobs=launched.prompt_logprobs,
            errors=errors,
            busy_ns=int(launched.began.elapsed_time(launched.done) * 1e6) - mask_wait_ns,
            batch_tokens=launched.verified,
            wait_ns=launched.wait_ns,
            confidence=answer.confidence,
            trimmed=answer.trimmed,
            illegal=launched.illegal,
            forced=launched.forced,
            mask_wait_ns=mask_wait_ns,
        )

    @torch.inference_mode()
    def _pass_on(self, step: int, packed: PackedRows, lens: I32, emitted: I32) -> None:
        """Move grammars and texts on, and end the step that waited for that."""
        if self._grammars is not None:
            self._grammars.advance(step, packed, lens, emitted)
        if self._processors is not None and self._processors.concern(packed.slots):
            accept_cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
            self._processors.advance(packed.slots, accept_cu, emitted)
        if self._later is not None:
            later, self._later = self._later, None
            later()

    def _refusal(self, launched: Launched, row: int) -> Refused | None:
        """Why the row's request cannot go on, where a processor or its grammar is to blame."""
        refused = None if launched.work is None else launched.work.refusal(row)
        if refused is not None or self._grammars is None:
            return refused
        return self._grammars.refusal(int(launched.packed.slots[row]))

    def seconds_of(self, tokens: int, turns: int) -> float:
        """T(tokens): the fastest of some decode-only steps of that many query tokens.

        The rows are padding, so this is the step without its reading of the KV cache.
        """
        return self._seconds(max(1, -(-tokens // self._tiers.width)), tokens, turns)

    def plain_seconds(self, sizes: Sequence[int], turns: int) -> list[float]:
        """T(tokens) of each size (rising), drafting left out.

        Sizes that rows without drafts can have are measured so. More tokens than rows can only be
        drafts: their steps are measured with drafting, whose time is what a step of all rows'
        drafts is longer than one of as many tokens without any.
        """
        most = self._tiers.max_rows
        top = self._seconds(most, most, turns)
        drafting = max(0.0, self.seconds_of(most, turns) - top)
        return [
            self._seconds(size, size, turns)
            if size <= most
            else max(top, self.seconds_of(size, turns) - drafting)
            for size in sizes
        ]

    def drafting_seconds(self, rows: Sequence[int], turns: int) -> list[float]:
        """What steps of so many rows (rising) that draft in full take above ``plain_seconds``."""
        wide = [count * self._tiers.width for count in rows]
        plain = self.plain_seconds(wide, turns)
        whole = [self._seconds(count, size, turns) for count, size in zip(rows, wide, strict=True)]
        return [max(_LEAST_S, w - p) for w, p in zip(whole, plain, strict=True)]

    def _seconds(self, rows: int, tokens: int, turns: int) -> float:
        tier = self._tiers.of(rows, tokens, False)
        run = self._timed_replay if tier is not None and self._graphs is not None else None
        if tier is None or run is None:
            tier = Tier(rows, tokens, 1 if tokens == rows else self._tiers.width, False)
            run = self._timed_run
        return min(run(tier) for _ in range(turns + 1))

    @torch.inference_mode()
    def replay_seconds(self, rows: int, tokens: int, steps: int) -> float | None:
        """Seconds a replay, ``steps`` back to back, of the graph of steps of this size.

        It does again what the latest such step did, from lengths that are ``steps`` lower. Slots'
        state is as before afterwards, but the KV of the tokens since is not: only for requests
        that are to be thrown away. None if no step of this size has run in a graph.
        """
        tier = self._tiers.of(rows, tokens, False)
        if tier is None or self._graphs is None or tier not in self._replayed:
            return None
        captured, state = self._graphs.get(tier), self._step.state
        # Draft pages have moved on since.
        split_device(captured.block, captured.staging).window_count.zero_()
        graph = captured.graph
        kept = [(t, t.clone()) for t in (state.seq_lens, state.last_tokens, state.out_counts)]
        state.seq_lens.sub_(steps).clamp_(min=0)
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        for _ in range(steps):
            graph.replay()
        torch.cuda.synchronize(self._device)
        seconds = (time.perf_counter() - began) / steps
        for tensor, before in kept:
            tensor.copy_(before)
        return seconds

    def reset(self) -> None:
        """Forget every slot; only while idle."""
        self._step.state.reset()
        if self._step.drafter is not None:
            self._step.drafter.reset()
        if self._grammars is not None:
            self._grammars.reset()
        if self._processors is not None:
            self._processors.reset()

    def close(self) -> None:
        """Let the graphs go, and with them what they hold on to; only while idle."""
        self._graphs = None

    @torch.inference_mode()
    def _timed_replay(self, tier: Tier) -> float:
        assert self._graphs is not None
        graph = self._graphs.get_padded(tier).graph
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    @torch.inference_mode()
    def _timed_run(self, tier: Tier) -> float:
        staging = tier_staging(tier, self._step.page_size)
        block = torch.zeros(sum(field_lengths(staging)), dtype=torch.int32, device=self._device)
        views = split_device(block, staging)
        views.slots.fill_(self._step.state.spare_slot)
        out = self._step.new_output(tier.rows, tier.width)
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        self._step.run(views, tier_shape(tier), out)
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    def _features(self, packed: PackedRows) -> int:
        table = self._step.state.sampling
        if not table.featured:
            return 0
        return int(np.bitwise_or.reduce(table.features[packed.slots], initial=0))

    def _replay(
        self, plan: StepPlan, packed: PackedRows, features: int, began: Mark
    ) -> Started | None:
        """Replay the step's graph, if it has one.

        ``began`` is recorded when the host's part is done: an idle device must not count it.
        """
        if self._graphs is None or packed.verify_rows < 0 or features & _LOGPROBS:
            return None
        prefill, verified = prefill_of(packed), self._verified(plan, packed)
        tiers = self._masked_tiers if features & _HOST else self._tiers
        tier = tiers.of(
            packed.verify_rows,
            (packed.tokens if verified is None else verified) - prefill.tokens,
            bool(features & _SAMPLED),
            bool(features & _EDITED),
            prefill,
            packed.tokens - prefill.tokens > packed.verify_rows,
        )
        if tier is not None and features & _HOST:
            tier = tier._replace(masked=True)
        graph = None if tier is None else self._graphs.holding(tier, plan)
        if tier is None or graph is None:
            return None
        self._replayed.add(tier)
        host = self._inputs.take(graph.block.numel())
        budget = plan.budget
        if self._aligns and budget >= 0 and verified is not None:
            budget += tier.tokens - verified  # padding verifies drafts instead
        spare = self._step.state.spare_slot
        gap = 0 if packed.decode_only else tier.rows - packed.verify_rows
        fill(host.array, graph.staging, packed, plan, spare, gap, budget)
        began.record()
        graph.block.copy_(host.tensor, non_blocking=True)
        graph.graph.replay()
        output = Output(graph.out, tier.all_rows, tier.width, gap)
        later = graph.later
        if later is None:
            return Started(output, lambda: _NO_SCORES)
        come = self._rows.fetch(later.laid(), packed, gap)
        later.forward.replay()
        wait = self._rows.wait()

        def finish() -> Scored:
            work = self._intervene(features, packed, come, later.found(), later.masks, wait)
            later.finish.replay()
            return _NO_SCORES._replace(work=work)

        return Started(output, finish, wait)

    def _intervene(
        self,
        features: int,
        packed: PackedRows,
        come: RowsToCome,
        found: Forwarded,
        masks: StepMasks,
        wait: MaskWait,
    ) -> ProcessorWork | None:
        """What the host has to say between F and A: grammars mask logits, processors edit them."""
        rows = come.wait()
        if features & _GRAMMAR and self._grammars is not None:
            self._grammars.fill(masks, packed, rows, wait)
        else:
            masks.places.fill_(FREE)
            wait.end.record()
        if not features & _PROCESSORS or self._processors is None or found.edited is None:
            return None
        if features & _GRAMMAR:
            # A does so again: what processors see has it already.
            mask_logits(found.edited, masks.places, masks.bits)
        work = self._processors.work(packed.slots, packed.kinds.tobytes(), rows)
        work.apply(found.edited)
        return work

    def _run(
        self,
        plan: StepPlan,
        packed: PackedRows,
        features: int,
        began: Mark,
        pieces: list[Piece],
    ) -> Started:
        """Run the step kernel by kernel, in its exact size."""
        staging = exact_staging(packed, plan)
        host = self._inputs.take(sum(field_lengths(staging)))
        spare = self._step.state.spare_slot
        fill(host.array, staging, packed, plan, spare, budget=plan.budget)
        began.record()
        block = host.tensor.to(self._device, non_blocking=True)
        sampled, edits = bool(features & _SAMPLED), bool(features & _EDITED)
        masked = bool(features & _HOST)
        shape = exact_shape(packed, sampled, edits, self._verified(plan, packed), masked)
        step, width = self._step, shape.width
        out = step.new_output(packed.rows, width)
        laid = step.lay(split_device(block, staging), shape, out)
        come: RowsToCome | None = None
        if masked:
            come = self._rows.fetch(laid, packed, 0)
        found = step.forward(laid)
        wait = None if come is None or found.logits is None else self._rows.wait()

        def finish() -> Scored:
            after, work = found, None
            masks: StepMasks | None = None
            if come is not None and wait is not None:
                assert found.logits is not None, "no wait without logits"
                after, masks = step.edit(laid, found), step.new_masks(len(found.logits))
                work = self._intervene(features, packed, come, after, masks, wait)
            choice = step.finish(laid, after, masks)
            logprobs = scores = _NO_LOGPROBS
            if features & _LOGPROBS and step.decides:
                logprobs = self._logprobs(packed, choice, out, width)
            if pieces and step.decides:
                scores = self._scores(pieces, choice)
            return Scored(logprobs, scores, work)

        return Started(Output(out, packed.rows, width, 0), finish, wait)

    def _scores(self, pieces: list[Piece], choice: Choice) -> tuple[RowLogprobs, ...]:
        """Log-probabilities of prompt tokens; rows may have been cut on the device."""
        cu_q = choice.batch.cu_q.cpu().numpy()
        return score_prompts(pieces, cu_q, choice.hidden, self._step.logits_of)

    def _logprobs(
        self, packed: PackedRows, choice: Choice, out: torch.Tensor, width: int
    ) -> tuple[RowLogprobs, ...]:
        """Log-probabilities, which need the emitted tokens on the host."""
        rows = packed.rows
        output = self._step.split_output(out.cpu(), rows, width)
        lens, grid = output.accept_lens.numpy(), output.tokens.numpy()
        emitted = grid[np.arange(width) < lens[:, None]]
        node_cu = packed.node_cu
        if packed.caps is not None and output.proposed is not None and self._compacts:
            nodes = np.where(packed.caps > 0, 1 + output.proposed.numpy(), np.diff(node_cu))
            node_cu = np.concatenate(([0], np.cumsum(nodes))).astype(np.int32)
        accept_cu = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(lens, out=accept_cu[1:])
        return collect_logprobs(
            choice.logits.float(),
            packed.slots,
            node_cu,
            accept_cu,
            choice.path.cpu().numpy()[np.arange(width) < lens[:, None]],
            emitted,
            self._step.state.sampling,
        )


def _synchronize(mark: Mark) -> None:
    mark.synchronize()
