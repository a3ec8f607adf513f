"""The worker: a thread that runs launched steps in order, so that planning overlaps them."""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import torch

from ..engine_core.config import CoreConfig
from ..engine_core.grammar_compiler import compiler_of
from ..engine_core.plan import HostDrafts, StepPlan, StepResult
from ..engine_core.processor_loader import processors_of
from ..engine_core.worker import Worker, WorkerFailed, WorkerInfo
from .draft_clock import draft_work
from .measure import StepTimer
from .speculative.device_drafter import LoadedModel, window_of
from .step import StepRunner

_JOIN_S = 5.0


class _Failure(str):
    """Traceback text of what ended the thread."""


class EngineWorker(Worker, Protocol):
    """A worker as the engine builds it: told once how the core will drive it."""

    def prepare(self, config: CoreConfig) -> None:
        """Get ready for steps of the resolved configuration."""
        ...

    def fail(self, reason: str) -> None:
        """From any thread: the device will not come back, ``collect`` must not wait for it."""
        ...

    def watch(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when the worker fails on its own."""
        ...

    def check(self) -> None:
        """Raise WorkerFailed if the worker has failed on its own."""
        ...


class Timer(Protocol):
    """What measures T(batch tokens), and what drafting takes by rows."""

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        """Seconds of a step of each size (rising), drafting left out."""
        ...

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Seconds of drafting for so many rows (rising)."""
        ...


class DeviceCounts(NamedTuple):
    """Steps of verify rows alone so far, and those of them that replayed a CUDA graph.

    ``gap_ns``: time that the device stood idle between consecutive steps. ``prefill_steps``,
    ``prefill_replays``: the same of steps with prefill rows. ``mask_wait_ns``: time that it stood
    within steps, waiting for grammars' masks; the host made ``mask_nodes`` of them in ``mask_ns``.
    """

    decode_steps: int
    replays: int
    gap_ns: int
    prefill_steps: int
    prefill_replays: int
    mask_wait_ns: int
    mask_ns: int
    mask_nodes: int


@runtime_checkable
class GraphWorker(Protocol):
    """What benchmarks ask of a worker that replays CUDA graphs."""

    @property
    def counts(self) -> DeviceCounts:
        """What it ran so far."""
        ...

    def set_verify_width(self, width: int) -> None:
        """Verify rows have up to ``width`` query tokens from now on; only while idle.

        Graphs are captured when they are first needed.
        """
        ...

    def replay_seconds(self, rows: int, tokens: int, steps: int) -> float | None:
        """Seconds a replay, back to back, of the graph that the latest step of this size ran.

        Lengths go back by ``steps`` for it and are restored; the KV of the tokens since is
        overwritten. None without such a graph.
        """
        ...


def counts_between(before: DeviceCounts, worker: GraphWorker) -> DeviceCounts:
    """What ``worker`` ran since ``before``."""
    now = worker.counts
    return DeviceCounts(*(a - b for a, b in zip(now, before, strict=True)))


class TorchWorker:
    """The :class:`~outrider.engine_core.worker.Worker` of one device, in one process.

    ``launch``, ``upload_drafts`` and ``collect`` are called from one thread. An exception in a
    step ends the worker: that ``collect`` and all later ones raise WorkerFailed with its
    traceback.
    """

    def __init__(
        self, info: WorkerInfo, runner: StepRunner, timer: Timer, draft: LoadedModel | None = None
    ) -> None:
        """``draft``: the draft model of algorithms that have one."""
        self._draft = draft
        self._info = info
        self._runner = runner
        runner.state.window = window_of(draft)
        if draft is not None and runner.state.window is None:
            runner.pools = (*runner.pools, draft.kv)
        self._timer = timer
        self._jobs: SimpleQueue[StepPlan | Callable[[], None] | None] = SimpleQueue()
        self._drafts: SimpleQueue[HostDrafts | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | _Failure] = SimpleQueue()
        self._failure: _Failure | None = None
        self._thread = threading.Thread(target=self._loop, name="outrider-worker", daemon=True)
        self._thread.start()

    def info(self) -> WorkerInfo:
        """Sizes that the core plans with."""
        return self._info

    def prepare(self, config: CoreConfig) -> None:
        """Make the device's drafter, the grammars' compiler and custom logits processors; all else
        grows with the steps. Raises RefusedError.
        """
        compiler = compiler_of(config)
        if compiler is not None:
            self._runner.obey(compiler, config.forced_drafts)
        processors = processors_of(config)
        if processors is not None:
            self._runner.process_with(processors)
        drafter = self._runner.prepare(config, self._draft)
        if drafter is None or self._draft is None:
            return
        if isinstance(self._timer, StepTimer):
            self._timer.draft_work = draft_work(drafter, self._draft, self._runner.state)

    def fail(self, reason: str) -> None:
        """Make ``collect`` raise behind the results that are in."""
        self._results.put(_Failure(reason))

    def watch(self, wake: Callable[[], None]) -> None:
        """It fails in steps alone."""

    def check(self) -> None:
        """It fails in steps alone."""

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        """T(batch tokens): seconds of a verify step of each size; only while idle."""
        times: list[float] = []
        self._call(lambda: times.extend(self._timer.measure(batch_tokens)))
        return times

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Seconds that a draft model's drafting for so many rows takes; only while idle."""
        times: list[float] = []
        self._call(lambda: times.extend(self._timer.measure_drafting(rows)))
        return times

    def launch(self, plan: StepPlan) -> None:
        """Queue a step; a late-bound one waits for its drafts."""
        self._jobs.put(plan)

    def upload_drafts(self, drafts: HostDrafts) -> None:
        """Give the drafts of the oldest launched late-bound step that lacks them."""
        self._drafts.put(drafts)

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises WorkerFailed."""
        if self._failure is None:
            result = self._results.get()
            if isinstance(result, StepResult):
                return result
            self._failure = result
        raise WorkerFailed(f"the worker failed:\n{self._failure}")

    def reset(self) -> None:
        """Forget every slot (only while idle); KV contents become meaningless."""
        self._call(self._runner.reset)

    def shutdown(self) -> None:
        """Stop after the steps already launched; idempotent. A step that hangs is left behind."""
        self._jobs.put(None)
        self._drafts.put(None)
        self._thread.join(_JOIN_S)

    def _call(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the worker's thread and wait for it."""
        failures: list[str] = []
        done = threading.Event()

        def job() -> None:
            try:
                work()
            except Exception:
                failures.append(traceback.format_exc())
            done.set()

        if self._thread.is_alive():
            self._jobs.put(job)
            while not done.wait(1.0):
                if not self._thread.is_alive():
                    raise WorkerFailed("the worker has stopped")
        else:
            raise WorkerFailed("the worker has stopped")
        if failures:
            raise WorkerFailed(f"the worker failed:\n{failures[0]}")

    @torch.inference_mode()
    def _loop(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if not isinstance(job, StepPlan):
                    job()
                    continue
                result = self._step(job)
                if result is None:
                    break
                self._results.put(result)
        except Exception:
            self._results.put(_Failure(traceback.format_exc()))
        else:
            self._results.put(_Failure("it was shut down"))

    def _step(self, plan: StepPlan) -> StepResult | None:
        """Run one step; None if the worker was shut down while it waited for drafts."""
        drafts: HostDrafts | None = None
        began = time.perf_counter_ns()
        wait_ns = 0
        if plan.late_bound:
            drafts = self._drafts.get()
            wait_ns = time.perf_counter_ns() - began
            if drafts is None:
                return None
            if drafts.step != plan.step:
                raise ValueError(f"drafts of step {drafts.step} came for step {plan.step}")
        result = self._runner.run(plan, drafts)
        busy_ns = time.perf_counter_ns() - began - wait_ns
        return _timed(result, busy_ns, wait_ns)


def _timed(result: StepResult, busy_ns: int, wait_ns: int) -> StepResult:
    return msgspec.structs.replace(result, busy_ns=busy_ns, wait_ns=wait_ns)
