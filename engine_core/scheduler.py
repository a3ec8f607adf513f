"""The scheduler: all open requests, which rows the next step has, and what a result means.

``plan`` and ``commit`` are deterministic functions of the state and their inputs. At most one
step is in flight when a step is planned; of its verify rows only bounds are known.
"""

from collections import deque
from typing import NamedTuple, final

import numpy as np

from .admission import Admission
from .commit import LENGTH, Progress, commit_row, kept_drafts
from .config import CoreConfig
from .counters import Counters
from .fast_rows import WEAK_REASONS, has_weak, move_counts, note_reason
from .ids import U8, RequestId, RowKind, i32
from .intake import derive_seed, refuse_request, request_cap
from .messages import FinishReason, GenerateRequest, RequestOutput
from .outputs import finish_output, progress_output
from .plan import StepPlan, StepResult
from .prefix_cache import PrefixCache
from .queue import WaitingQueue
from .refusal import Refused
from .request import Draining, Request, Running, Waiting
from .running_batch import RunningBatch
from .step_builder import Flight
from .step_planner import StepPlanner, StepPolicy
from .step_rows import SlowRows, kept_tokens, note_unmatched, read_result, slow_rows
from .tail_decoder import TailDecoder
from .verify_steps import VerifySteps
from .window_steps import WindowSteps
from .worker import WorkerFailed

QUEUE_FULL = "the queue is full ({limit} requests wait); try again later"


class Committed(NamedTuple):
    """What requests kept of one step: bytes of slots and counts int32[M], and tokens int32, joined.

    News for clients is due from all rows of the plan but ``slow_rows``, and from ``touched``.
    """

    slots: bytes
    counts: bytes
    tokens: bytes
    plan: StepPlan
    slow_rows: list[int]
    touched: list[Request]


@final
class Scheduler:
    """All open requests, the KV pages and the steps in flight."""

    def __init__(
        self, config: CoreConfig, *, tail: TailDecoder | None, policy: StepPolicy | None
    ) -> None:
        engine, worker = config.engine, config.worker
        self.config = config
        self.counters = Counters()
        self.windows: WindowSteps | None = None
        if config.window_pool is not None:
            self.windows = WindowSteps(
                config.window_pool, worker.num_pages, worker.page_size, worker.max_slots
            )
        self.cache = PrefixCache(
            worker.num_pages,
            worker.page_size,
            not engine.disable_radix_cache,
            None if self.windows is None else self.windows.freed,
        )
        self.batch = RunningBatch(self.cache, worker.max_slots, config.kv_reach, self.windows)
        self.queue = WaitingQueue(engine.schedule_policy, engine.enable_priority_scheduling)
        self.admission = Admission(
            self.cache,
            self.queue,
            self.batch,
            config.max_running_requests,
            config.kv_reach,
            config.recomputes_last,
        )
        self.flights: deque[Flight] = deque()
        self.done_step = 0
        self.verify: VerifySteps | None = None
        if config.ragged.planned:
            self.verify = VerifySteps(config.ragged, worker.max_slots)
        self._planner = StepPlanner(
            config,
            self.batch,
            self.queue,
            self.admission,
            self.counters,
            policy,
            self._settle,
            self._end,
            self.verify,
        )
        drafter = config.drafter
        self._device_drafts = drafter is not None and bool(drafter.on_device)
        self._tail = tail
        self._eos = frozenset(worker.eos_ids)
        self._step = 0
        self._arrivals = 0
        self._seeds = 0
        self._news: list[RequestOutput] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would change anything."""
        return bool(self.batch.states or self.flights or self._news)

    @property
    def idle(self) -> bool:
        """Whether no request is open and no step in flight."""
        return not self.batch.states and not self.flights

    def submit(self, message: GenerateRequest) -> Refused | None:
        """Queue a request, or say why it is not served."""
        if message.rid in self.batch.states:
            return Refused("rid", f"{message.rid!r} is open already; use another id")
        refused = refuse_request(message, self.config, self._tail is not None)
        if refused is not None:
            return refused
        refused = self._make_room(message)
        if refused is not None:
            return refused
        seed = message.params.seed
        if seed is None:
            seed = derive_seed(self.config.engine.random_seed, self._seeds)
            self._seeds += 1
        progress = Progress(
            message.params,
            len(message.prompt) // 4,
            self.config.context_length,
            self._eos,
            self._tail,
        )
        cap = request_cap(message, self.config)
        waiting = Waiting(Request(message, self._arrivals, seed, cap, progress))
        self._arrivals += 1
        self.batch.states[waiting.request.rid] = waiting
        self.queue.push(waiting)
        return None

    def abort(self, rid: str, reason: FinishReason | None = None) -> bool:
        """End the request of exactly this id, whatever its phase; False for an unknown one."""
        state = self.batch.states.get(RequestId(rid))
        if state is None:
            return False
        self.counters.aborts += 1
        self._end(state, reason or FinishReason("abort", message="aborted by the client"))
        self._settle()
        return True

    def plan(self) -> StepPlan | None:
        """Plan the next step; None where no request can have a row."""
        if len(self.flights) > 1:
            raise RuntimeError("two steps are in flight; commit one before planning")
        flight = self._planner.plan(self._step + 1)
        if flight is None:
            if self.idle:
                self.admission.ratio.reset()
            return None
        self._step += 1
        self.counters.steps += 1
        self.flights.append(flight)
        return flight.plan

    def commit(self, result: StepResult) -> list[RequestOutput]:
        """Apply the oldest step's result and return what clients are told.

        Raises WorkerFailed when the result does not answer the plan.
        """
        committed = self.apply(result)
        return self.outputs(committed)

    def apply(self, result: StepResult) -> Committed:
        """The part of ``commit`` that the next step's drafts wait for."""
        flight = self.flights[0]
        read_result(flight, result, self.config.worker.vocab_size)
        if self._device_drafts:
            note_unmatched(flight, result)
        if self.verify is not None:
            self.verify.committed(flight.plan, result)
        self.counters.count_drafts(flight.plan, result)
        self.flights.popleft()
        self.done_step = flight.plan.step
        if self.windows is not None:
            self.windows.done(self.done_step)
        self.counters.worker_busy_ns += result.busy_ns
        self.counters.mask_wait_ns += result.mask_wait_ns
        self._end_copies(flight)
        committed = self._apply_rows(flight, result)
        self._settle()
        return committed

    def outputs(self, committed: Committed) -> list[RequestOutput]:
        """News of a commit, and of everything that ended since the last call."""
        out = self._news
        self._news = []
        interval = self.config.engine.stream_interval
        out.extend(
            self.batch.table.stream_outputs(
                committed.plan.slots, committed.slow_rows, interval, RequestOutput
            )
        )
        for request in committed.touched:
            output = progress_output(request, interval)
            if output is not None:
                out.append(output)
        return out

    def take_news(self) -> list[RequestOutput]:
        """Ends of requests since the last call, without a commit."""
        out = self._news
        self._news = []
        return out

    def fail_all(self, message: str) -> list[RequestOutput]:
        """End every open request; the worker will answer nothing that is in flight."""
        self.flights.clear()
        if self.verify is not None:
            self.verify.reset()
        self.done_step = self._step
        if self.windows is not None:
            self.windows.fail()
        for state in list(self.batch.states.values()):
            self._end(state, FinishReason("abort", message=message, status=500))
        self._settle()
        self.cache.flush()
        return self.take_news()

    def _end_copies(self, flight: Flight) -> None:
        """The step copied pages for the requests that entered with it: let their sources go."""
        for init in flight.plan.inits:
            owner = self.batch.by_slot[init.slot]
            assert owner is not None, "a slot with a row in flight was freed"
            owner.lease.end_copy()

    def _make_room(self, message: GenerateRequest) -> Refused | None:
        """Refuse a request that finds the queue full, or end a waiting one of lower priority."""
        limit = self.config.engine.max_queued_requests
        if limit is None or len(self.queue) < limit:
            return None
        last = self.queue.last()
        full = QUEUE_FULL.format(limit=limit)
        if last.request.priority >= message.priority:
            return Refused("max_queued_requests", full, 503)
        self.counters.aborts += 1
        self._end(last, FinishReason("abort", message=full, status=503))
        return None

    def _apply_rows(self, flight: Flight, result: StepResult) -> Committed:
        """Commit plain rows in one compiled call and the others one by one."""
        plan = flight.plan
        fast = self.batch.table.commit_fast(
            plan.step,
            plan.slots,
            plan.kinds,
            result.accept_lens,
            result.tokens,
            result.proposed,
            result.depths,
            self._strong_reasons(flight),
            self.counters.accepted_per_pos,
            self.counters.drafted_per_pos,
        )
        self.counters.count_fast(fast)
        if not fast.slow_rows:
            return Committed(plan.slots, result.accept_lens, result.tokens, plan, [], [])
        rows = slow_rows(result)
        counts = rows.accept_lens.copy()
        touched: list[Request] = []
        for row in fast.slow_rows:
            counts[row] = self._apply_slow(flight, rows, row, touched)
        kept = counts > 0
        return Committed(
            flight.slots[kept].tobytes(),
            counts[kept].tobytes(),
            kept_tokens(rows, counts).tobytes(),
            plan,
            fast.slow_rows,
            touched,
        )

    def _strong_reasons(self, flight: Flight) -> U8:
        """The rows' reasons for the table, after noting the weak ones, which it leaves out."""
        if not has_weak(flight.reasons):
            return flight.reasons
        weak = np.isin(flight.reasons, WEAK_REASONS)
        for row in np.flatnonzero(weak).tolist():
            owner = self.batch.by_slot[flight.slots[row]]
            if owner is not None:
                note_reason(owner.request.progress, int(flight.reasons[row]))
        return np.where(weak, np.uint8(0), flight.reasons)

    def _apply_slow(self, flight: Flight, rows: SlowRows, row: int, touched: list[Request]) -> int:
        """Commit one row in full; return how many tokens its request kept."""
        owner = self.batch.by_slot[flight.slots[row]]
        assert owner is not None, "a slot with a row in flight was freed"
        if owner.request.progress.finish is not None:
            self.counters.dropped_rows += 1
            return 0
        if isinstance(owner, Running):
            move_counts(self.batch.table, owner.slot, owner.request)
        kept = self._apply_row(flight, rows, row, owner)
        finished = owner.request.progress.finish is not None
        if kept or finished:
            touched.append(owner.request)
        if finished:
            self._leave(owner)
        return kept

    def _apply_row(
        self, flight: Flight, rows: SlowRows, row: int, owner: Running | Draining
    ) -> int:
        """Give one row's run to its request; return how many tokens it kept."""
        progress, step = owner.request.progress, flight.plan.step
        error = rows.errors.get(row)
        if error is not None:
            self.counters.row_errors += 1
            progress.end(FinishReason("abort", message=error.message, status=error.status))
            self.batch.table.settle(owner.slot, 0, step)
            return 0
        start = int(rows.starts[row])
        run = rows.tokens[start : start + int(rows.accept_lens[row])].tolist()
        kind, proposed = RowKind(flight.plan.kinds[row]), int(rows.proposed[row])
        try:
            if progress.prompt_scores is not None and kind is not RowKind.VERIFY:
                first = int(i32(flight.plan.starts)[row])
                end = first + int(flight.q_caps[row])
                progress.prompt_scores.add(first, end, rows.prompt_logprobs.get(row, ()))
            kept = commit_row(progress, run, kind, proposed, rows.logprobs.get(row, ()))
        except ValueError as failure:
            raise WorkerFailed(f"step {step}: row {row}: {failure}") from failure
        self.batch.table.settle(owner.slot, kept, step)
        self.counters.generated_tokens += kept
        if kind is RowKind.VERIFY:
            self._count_verify(flight, rows, row, owner, kept, len(run))
        elif self._prefill_is_in(owner, flight, row):
            self.batch.publish(owner)
            if not owner.request.generates:
                progress.end(LENGTH)
        return kept

    def _prefill_is_in(self, owner: Running | Draining, flight: Flight, row: int) -> bool:
        """Whether this chunk's result completes the KV of the prompt (and earlier output)."""
        if owner.request.generates:
            return flight.plan.kinds[row] == RowKind.PREFILL_LAST
        table = self.batch.table
        return table.unfilled(owner.slot) == 0 and table.last_step(owner.slot) == flight.plan.step

    def _count_verify(
        self,
        flight: Flight,
        rows: SlowRows,
        row: int,
        owner: Running | Draining,
        kept: int,
        run: int,
    ) -> None:
        proposed = int(rows.proposed[row])
        if proposed == 0:
            self.counters.plain_rows += 1
            note_reason(owner.request.progress, int(flight.reasons[row]))
            return
        correct = kept_drafts(kept, run)
        self.counters.count_verify(proposed, int(rows.depths[row]), correct, kept)

    def _leave(self, owner: Running | Draining) -> None:
        """A commit finished this request."""
        finish = owner.request.progress.finish
        if finish is not None and finish.kind != "abort":
            self.counters.finished += 1
        if isinstance(owner, Running):
            self.batch.leave(owner)
        else:
            self.batch.finish_draining(owner)

    def _end(self, state: Waiting | Running | Draining, reason: FinishReason) -> None:
        """End a request from outside any commit; its client is told at once."""
        request = state.request
        if isinstance(state, Running):
            move_counts(self.batch.table, state.slot, request)
        request.progress.end(reason)
        self._news.append(finish_output(request))
        match state:
            case Waiting():
                self.queue.remove(state)
                del self.batch.states[request.rid]
            case Running():
                self.batch.leave(state)
            case Draining():
                self.batch.finish_draining(state)

    def _settle(self) -> None:
        """Free what drained; the retracted wait again."""
        for state in self.batch.drain(self.done_step):
            if isinstance(state, Waiting):
                self.queue.push(state)
