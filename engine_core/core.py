"""The engine core: one scheduler, one worker, and the iteration that overlaps the two."""

import os
from time import perf_counter_ns, thread_time_ns
from typing import final

from .checks import check_all
from .config import CoreConfig
from .counters import used
from .device_drafts import DeviceDrafts
from .device_lengths import DeviceLengths
from .grammar_compiler import GrammarCompiler, refuse_grammar
from .grammar_spec import GrammarSpec
from .host_drafter import HostDrafter
from .late_drafts import DraftPolicy, LateDrafts
from .messages import CoreStats, FlushCache, GenerateRequest, RequestOutput
from .processor_loader import ProcessorSet, refuse_processor_calls
from .refusal import Refused
from .scheduler import Scheduler
from .tail_decoder import TailDecoder
from .trace import TraceWriter
from .worker import Worker


@final
class EngineCore:
    """Drives a worker through the scheduler's steps.

    With overlap, a call of ``step`` plans and launches step n+1 while step n runs, then waits for
    the result of step n; without, for that of the step it launched. Drafts that wait for a
    result are proposed and uploaded before anything else is done with it.
    """

    def __init__(
        self,
        config: CoreConfig,
        worker: Worker,
        *,
        host_drafter: HostDrafter | None = None,
        tail: TailDecoder | None = None,
        controller: DraftPolicy | None = None,
        device_lengths: DeviceLengths | None = None,
        grammars: GrammarCompiler | None = None,
        processors: ProcessorSet | None = None,
        trace: TraceWriter | None = None,
        check: bool | None = None,
    ) -> None:
        """``grammars``, ``processors``: None where requests may have none. ``check`` None follows
        the environment's OUTRIDER_CHECK. ``device_lengths``: of a drafter that the worker runs.
        Raises ValueError unless a host drafter comes with a controller.
        """
        if (host_drafter is None) != (controller is None):
            raise ValueError("a host drafter and a length controller come together")
        self.config = config
        self.scheduler = Scheduler(config, tail=tail, policy=controller or device_lengths)
        self._worker = worker
        self._grammars = grammars
        self._processors = processors
        self._held: dict[str, GrammarSpec] = {}  # by open requests
        self._overlap = not config.engine.disable_overlap_schedule
        self._check = os.environ.get("OUTRIDER_CHECK") == "1" if check is None else check
        self._trace = trace
        self._drafts: LateDrafts | None = None
        if host_drafter is not None and controller is not None:
            self._drafts = LateDrafts(
                host_drafter, controller, self.scheduler.batch, self.scheduler.counters, config
            )
        self._device: DeviceDrafts | None = None
        if device_lengths is not None:
            self._device = DeviceDrafts(device_lengths, alone=host_drafter is None)
        self._plan_ns = 0
        self._commit_ns = 0
        self._propose_ns = 0
        self._draft_wait_ns = 0

    @property
    def grammars(self) -> GrammarCompiler | None:
        """What compiles requests' grammars; None where they may have none."""
        return self._grammars

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return self.scheduler.has_work

    def submit(self, message: GenerateRequest) -> Refused | None:
        """Queue a request, or say why it is not served."""
        refused = refuse_grammar(message.params.grammar, self.config, self._grammars)
        calls = message.params.logits_processors
        refused = refused or refuse_processor_calls(calls, self._processors)
        refused = refused or self.scheduler.submit(message)
        spec = message.params.grammar
        if refused is None and spec is not None and self._grammars is not None:
            self._grammars.hold(spec)
            self._held[message.rid] = spec
        if refused is None and self._trace is not None:
            self._trace.submit(message)
        return refused

    def abort(self, rid: str) -> bool:
        """End the request of exactly this id; False if there is none."""
        found = self.scheduler.abort(rid)
        if found and self._trace is not None:
            self._trace.abort(rid)
        return found

    def step(self) -> list[RequestOutput]:
        """One iteration. Raises WorkerFailed; ``fail_all`` is then due."""
        flights = self.scheduler.flights
        launched = self._launch()
        if launched and len(flights) == 1:
            self._bind()
        if flights and not (launched and self._overlap and len(flights) == 1):
            outputs = self._collect()
        else:
            outputs = self.scheduler.take_news()
        if self._check:
            check_all(self.scheduler)
        if self._trace is not None:
            self._trace.commit(outputs)
        self._let_go(outputs)
        return outputs

    def flush_cache(self) -> Refused | None:
        """Empty the radix cache and forget the learned n-grams; refused unless idle."""
        if not self.scheduler.idle:
            return Refused("flush_cache", "requests are open; try again when all are done")
        self.scheduler.cache.flush()
        self._worker.reset()
        if self._drafts is not None:
            self._drafts.flush()
        if self._trace is not None:
            self._trace.control(FlushCache(call=0))
        return None

    def fail_all(self, message: str) -> list[RequestOutput]:
        """End every open request with status 500, after the worker failed."""
        outputs = self.scheduler.fail_all(message)
        self._let_go(outputs)
        return outputs

    def stats(self, call: int) -> CoreStats:
        """Gauges and counters now, as the answer to ``call``."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        tree = scheduler.cache.tree
        return CoreStats(
            call=call,
            running=len(scheduler.batch),
            waiting=len(scheduler.queue),
            free_pages=scheduler.cache.allocator.free_pages,
            total_pages=scheduler.cache.total,
            cached_pages=tree.total_pages,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            cached_tokens=counters.cached_tokens,
            retractions=counters.retractions,
            aborts=counters.aborts,
            finished=counters.finished,
            spec_drafts=counters.spec_drafts,
            spec_draft_tokens=counters.spec_draft_tokens,
            spec_accepted_tokens=counters.spec_accepted_tokens,
            spec_accepted_per_pos=used(counters.accepted_per_pos),
            spec_drafted_per_pos=used(counters.drafted_per_pos),
            spec_verify_tokens=counters.spec_verify_tokens,
            plain_rows=counters.plain_rows,
            draft_invalid=counters.draft_invalid,
            plan_cpu=self._plan_ns * 1e-9,
            commit_cpu=self._commit_ns * 1e-9,
            propose_cpu=self._propose_ns * 1e-9,
            worker_busy=counters.worker_busy_ns * 1e-9,
            wait_for_drafts=self._draft_wait_ns * 1e-9,
            ngram_nodes=0 if self._drafts is None else self._drafts.nodes,
            evicted_pages=scheduler.cache.evicted_pages,
            verify_budget_steps=counters.budget_steps,
            verify_budget_drafts=counters.budget_drafts,
            verify_trimmed_drafts=counters.trimmed_drafts,
            illegal_drafts=counters.illegal_drafts,
            forced_drafts=counters.forced_drafts,
            wait_for_masks=counters.mask_wait_ns * 1e-9,
            **self._window_stats(),
        )

    def _let_go(self, outputs: list[RequestOutput]) -> None:
        """The grammars of requests that have ended may be forgotten."""
        if self._held and self._grammars is not None:
            for output in outputs:
                spec = None if output.finish is None else self._held.pop(output.rid, None)
                if spec is not None:
                    self._grammars.release(spec)

    def _window_stats(self) -> dict[str, int]:
        windows = self.scheduler.windows
        if windows is None:
            return {}
        stats = windows.stats
        return {
            "window_drafts": windows.drafts,
            "window_short_drafts": windows.short_drafts,
            "window_page_failures": stats.alloc_failures,
            "window_peak_pages": stats.high_water,
        }

    def _launch(self) -> bool:
        """Plan and launch a step, if there is one."""
        began = thread_time_ns()
        plan = self.scheduler.plan()
        self._plan_ns += thread_time_ns() - began
        if plan is None:
            return False
        if self._trace is not None:
            self._trace.plan(plan)
        self._worker.launch(plan)
        if self._drafts is not None:
            began = thread_time_ns()
            self._drafts.plan_made(plan)
            self._propose_ns += thread_time_ns() - began
        if self._device is not None:
            self._device.plan_made(plan)
        return True

    def _collect(self) -> list[RequestOutput]:
        """Take the oldest step's result; drafts for the next one go out before the outputs."""
        self._shadow()
        result = self._worker.collect()
        arrived = perf_counter_ns()
        if self._trace is not None:
            self._trace.result(result)
        began = thread_time_ns()
        committed = self.scheduler.apply(result)
        self._commit_ns += thread_time_ns() - began
        if self._drafts is not None:
            began = thread_time_ns()
            self._drafts.committed(result, committed)
            self._propose_ns += thread_time_ns() - began
        if self._device is not None:
            self._device.committed(committed.plan, result)
        if self._bind():
            self._draft_wait_ns += perf_counter_ns() - arrived
        if not committed.plan.late_bound:
            self._draft_wait_ns += result.wait_ns
        began = thread_time_ns()
        outputs = self.scheduler.outputs(committed)
        self._commit_ns += thread_time_ns() - began
        return outputs

    def _bind(self) -> bool:
        """Upload the drafts of the only step in flight, if it waits for them."""
        flights = self.scheduler.flights
        if not flights or self._drafts is None or not flights[0].plan.late_bound:
            return False
        began = thread_time_ns()
        drafts = self._drafts.bind(flights[0])
        if self._device is not None:
            self._device.bound(drafts)
        if self._trace is not None:
            self._trace.drafts(drafts)
        self._worker.upload_drafts(drafts)
        self._propose_ns += thread_time_ns() - began
        return True

    def _shadow(self) -> None:
        flight = self.scheduler.flights[0]
        if self._drafts is not None and not flight.plan.late_bound:
            began = thread_time_ns()
            self._drafts.shadow(flight)
            self._propose_ns += thread_time_ns() - began
