"""The worker of one GPU: launches from the core's own thread, which the device outruns."""

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ...engine_core.config import CoreConfig, EngineConfig
from ...engine_core.grammar_compiler import compiler_of
from ...engine_core.graph_sizes import graph_chunk, graph_rows
from ...engine_core.plan import HostDrafts, StepPlan, StepResult
from ...engine_core.processor_loader import processors_of
from ...engine_core.worker import WorkerFailed, WorkerInfo
from ...kernels.simulate_survival_gpu import simulate_survival
from ..agreement import Ranks
from ..dependent_launch import launches_dependents
from ..kv_pool import KVPool
from ..models import GpuModel
from ..models.block_net import GpuBlockNet
from ..models.draft_net import GpuDraftNet
from ..models.torch_block import block_of
from ..sampling.slot_processors import SlotProcessors
from ..sampling.thresholds import thresholds_of
from ..speculative.device_drafter import LoadedModel, window_of
from ..speculative.drafter_maker import make_drafter
from ..speculative.simulate import SimulatedSurvival
from ..worker import DeviceCounts
from .device_step import DeviceStep
from .grammar_steps import GrammarSteps
from .graphs import StepGraphs
from .launched import Launched
from .marks import Mark, wait_unless
from .packer import StepPacker
from .ragged_step import RaggedStep
from .state import DeviceState
from .step_runner import GpuStepRunner
from .tiers import Tiers, block_sizes, pass_sizes

_TURNS = 3
_STEP_TIMEOUT_S = 120.0  # of a step over several ranks


class GpuWorker:
    """The :class:`~outrider.engine_core.worker.Worker` of one GPU.

    No thread: a launch only enqueues. A late-bound step is enqueued when its drafts come, and one
    whose grammars may force drafts when the one before is collected, if that pays; they and what
    follows them wait in ``_held``. An exception ends the worker: that ``collect`` and all later
    ones raise WorkerFailed with its traceback.
    """

    def __init__(
        self,
        info: WorkerInfo,
        config: EngineConfig,
        model: GpuModel,
        kv: KVPool,
        max_pages: int,
        ranks: Ranks | None = None,
        draft: LoadedModel | None = None,
    ) -> None:
        """``max_pages``: pages of the longest sequence, with what steps in flight overrun.

        ``ranks``: those that share the model, if there are several. ``draft``: the draft model of
        algorithms that have one.
        """
        self._draft = draft
        self._info = info
        self._use_graphs = not config.disable_cuda_graph
        self._max_rows = config.max_running_requests
        self._max_graph_rows = graph_rows(config)
        self._chunk = graph_chunk(config)
        self._device = kv.data.device
        decides = ranks is None or ranks.leads
        state = DeviceState(info.max_slots, max_pages, info.vocab_size, self._device, decides)
        self._model = model
        self._step = DeviceStep(model, kv, state, config.simulate_accept_length, ranks=ranks)
        state.window = window_of(draft)
        if draft is not None and state.window is None:
            self._step.pools = (kv, draft.kv)
        self._kv = kv
        self._wait = None if ranks is None else self._wait_for_ranks
        self._packer = StepPacker(info.max_slots, info.vocab_size)
        self._masked_width = 1  # most query tokens of a verify row of steps with grammars,
        self._forced: int | None = None  # and drafts of all their rows, if there is such a limit
        self._reach = 1  # tokens of KV that drafts of a row may write, see tier_staging
        self._aligns = False
        self._grammars: GrammarSteps | None = None
        self._processors: SlotProcessors | None = None
        self._runner = self._make_runner(1)
        self._held: deque[StepPlan] = deque()
        self._launched: deque[Launched] = deque()
        self._waits_for_step = False  # the first of those held
        self._free_since = 0  # when the device last ran out of steps
        self._failure: str | None = None
        self._inference = torch.inference_mode()  # made once, entered at each step

    def info(self) -> WorkerInfo:
        """Sizes that the core plans with."""
        return self._info

    def prepare(self, config: CoreConfig) -> None:
        """Make the device's drafter and capture the steps that the core is expected to plan."""
        page_table = self._step.state.page_table
        drafter = make_drafter(config, page_table, self._model, self._kv, self._draft)
        self._step.thresholds = thresholds_of(config.engine)
        if drafter is not None:
            self._step.drafter = drafter
            self._step.rule = config.engine.accept_rule
            self._packer = StepPacker(self._info.max_slots, self._info.vocab_size, True)
        if drafter is not None and config.ragged.mode != "static":
            pdl = launches_dependents(self._device)
            self._step.ragged = RaggedStep(config.ragged, self._device, pdl)
        mean = config.engine.simulate_survival
        if mean is not None:
            drafts = config.draft_width - 1
            self._step.survival = SimulatedSurvival(mean, drafts, simulate_survival)
        self._aligns = config.ragged.align
        compiler = compiler_of(config)
        if compiler is not None:
            self._grammars = GrammarSteps(compiler, self._device, config.forced_drafts)
        processors = processors_of(config)
        if processors is not None:
            self._processors = SlotProcessors(processors)
        self._reach = max(1, config.kv_reach)
        self._masked_width, self._forced = config.verify_width, config.forced_drafts
        self.set_verify_width(config.draft_width)
        self._runner.capture()

    @property
    def counts(self) -> DeviceCounts:
        """Steps, replays and the device's idle time since the graphs were captured."""
        runner, grammars = self._runner, self._grammars
        return DeviceCounts(
            runner.decode_steps,
            runner.replays,
            runner.gap_ns,
            runner.prefill_steps,
            runner.prefill_replays,
            runner.mask_wait_ns,
            0 if grammars is None else grammars.mask_ns,
            0 if grammars is None else grammars.mask_nodes,
        )

    def set_verify_width(self, width: int) -> None:
        """Verify rows have up to ``width`` query tokens from now on; only while idle.

        Chooses the matmuls of such steps, so all graphs are captured anew.
        """
        tiers = Tiers(self._max_rows, width).all() + self._tiers(width).mixed()
        self._model.tune({size for tier in tiers for size in (tier.tokens, tier.nodes)})
        net = None if self._draft is None else self._draft.net
        if isinstance(net, GpuBlockNet):
            net.tune(block_sizes(tiers, block_of(net.config)))
        elif self._draft is not None and isinstance(net, GpuDraftNet):
            net.tune(pass_sizes(tiers, self._draft.shape))
        self._runner = self._make_runner(width)

    def replay_seconds(self, rows: int, tokens: int, steps: int) -> float | None:
        """Seconds a replay of the graph that the latest step of this size ran, back to back."""
        return self._runner.replay_seconds(rows, tokens, steps)

    def _make_runner(self, width: int) -> GpuStepRunner:
        graphs: StepGraphs | None = None
        if self._use_graphs:
            graphs = StepGraphs(self._step, self._device, self._reach, self._masked_width)
        return GpuStepRunner(
            self._step,
            self._packer,
            self._tiers(width),
            graphs,
            self._device,
            self._wait,
            self._aligns,
            self._grammars,
            self._tiers(max(width, self._masked_width), self._forced),
            self._processors,
        )

    def _tiers(self, width: int, drafts: int | None = None) -> Tiers:
        """The tiers of graphs."""
        compact = self._step.ragged is not None and self._step.ragged.compacts
        return Tiers(self._max_graph_rows, width, self._chunk, compact, drafts)

    def fail(self, reason: str) -> None:
        """Make ``collect`` raise; only a worker of several ranks notices while it waits."""
        self._failure = self._failure or reason

    def watch(self, wake: Callable[[], None]) -> None:
        """It fails in steps alone."""

    def check(self) -> None:
        """It fails in steps alone."""

    def _wait_for_ranks(self, mark: Mark) -> None:
        """Wait for a step in which another rank may be dead. Raises RuntimeError."""
        wait_unless(mark, lambda: self._failure, _STEP_TIMEOUT_S)

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        """T(batch tokens): seconds of a verify step of each size; only while idle."""
        if self._draft is None:
            return [self._runner.seconds_of(tokens, _TURNS) for tokens in batch_tokens]
        return self._runner.plain_seconds(batch_tokens, _TURNS)

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Seconds that steps of so many rows take longer with drafts in full than without any.

        Of their tokens alone the steps without drafts are measured for, too.
        """
        return self._runner.drafting_seconds(rows, _TURNS)

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step; a late-bound one waits for its drafts."""
        self._held.append(plan)
        self._launch_held()

    def upload_drafts(self, drafts: HostDrafts) -> None:
        """Give the drafts of the oldest launched late-bound step that lacks them."""
        if self._failure is not None:
            return
        if not self._held:
            self._failure = f"drafts of step {drafts.step} came, but no step waits for any"
            return
        plan = self._held.popleft()
        if drafts.step != plan.step:
            self._failure = f"drafts of step {drafts.step} came for step {plan.step}"
            return
        wait_ns = 0 if self._launched else time.perf_counter_ns() - self._free_since
        self._start(plan, drafts, wait_ns)
        self._launch_held()

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises WorkerFailed."""
        if self._launched:
            try:
                result = self._runner.result(self._launched.popleft())
            except Exception:
                self._failure = self._failure or traceback.format_exc()
                self._launched.clear()
            else:
                if not self._launched:
                    self._free_since = time.perf_counter_ns()
                self._launch_held()
                return result
        raise WorkerFailed(f"the worker failed:\n{self._failure or 'no step was launched'}")

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget every slot (only while idle); KV contents become meaningless."""
        self._runner.reset()

    def shutdown(self) -> None:
        """Wait for the steps already launched; idempotent."""
        self._held.clear()
        if self._launched:
            self._launched.clear()
            # A device that has failed says so again here; whoever asked for results knows.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
        self._runner.close()

    def _launch_held(self) -> None:
        while self._held and not self._held[0].late_bound:
            if self._launched and self._runner.waits(self._held[0]):
                self._waits_for_step = True
                return
            wait_ns = 0
            if self._waits_for_step and not self._launched:
                wait_ns = time.perf_counter_ns() - self._free_since
            self._waits_for_step = False
            self._start(self._held.popleft(), None, wait_ns)

    def _start(self, plan: StepPlan, drafts: HostDrafts | None, wait_ns: int) -> None:
        if self._failure is not None:
            return
        try:
            with self._inference:
                self._launched.append(self._runner.launch(plan, drafts, wait_ns))
        except Exception:
            self._failure = traceback.format_exc()
