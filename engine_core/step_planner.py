"""Makes the next step: verify rows of all that decode, and prefill chunks within a budget."""

from collections.abc import Callable
from typing import Protocol, final

import numpy as np
import numpy.typing as npt

from .admission import Admission
from .config import CoreConfig
from .controller import StepLengths
from .counters import Counters
from .fast_rows import NO_PAGES
from .ids import I32, RowKind, i32
from .messages import FinishReason
from .plan import SlotInit
from .prefix_cache import CachedPrefix, PrefixCache
from .queue import WaitingQueue
from .request import Running, Waiting
from .retraction import Retraction
from .running_batch import RunningBatch
from .step_builder import Flight, StepBuilder
from .verify_steps import VerifySteps


class StepPolicy(Protocol):
    """What planning asks of the length controller."""

    def plan(self, slots: I32, room: I32, batch_tokens: int) -> StepLengths:
        """Draft caps int32[V] of the verify rows, and whether the step waits for drafts."""
        ...


@final
class StepPlanner:
    """Continuous batching with chunked prefill.

    Decode rows always ride along and come first to the pages. The chunk budget then goes to the
    prefilling requests in the order of their admission, then to new ones; what does not fit waits
    for the next step.
    """

    def __init__(
        self,
        config: CoreConfig,
        batch: RunningBatch,
        queue: WaitingQueue,
        admission: Admission,
        counters: Counters,
        policy: StepPolicy | None,
        settle: Callable[[], None],
        end: Callable[[Running, FinishReason], None],
        verify: VerifySteps | None = None,
    ) -> None:
        """``verify``: plans how many drafts each step verifies."""
        self._config = config
        self._batch = batch
        self._cache: PrefixCache = batch.cache
        self._queue = queue
        self._admission = admission
        self._max_drafts = config.verify_width - 1
        self._counters = counters
        self._policy = policy
        self._settle = settle
        self._end = end
        self._use_priority = config.engine.enable_priority_scheduling
        self._retraction = Retraction(self._cache, batch, admission, counters, self._use_priority)
        self._reasons = np.zeros(config.worker.max_slots, dtype=np.uint8)
        self._plain_caps = np.ones(config.worker.max_slots, dtype=np.int32)
        self._verify = verify
        # Without confidence, rows are verified in full and accept what the length policy says.
        self._caps_accepts = config.ragged.mode == "cap-accept" and verify is None
        self._accept_caps = np.zeros(config.worker.max_slots, dtype=np.int32)
        # Slots whose requests have a grammar, which may force drafts.
        self._constrained = np.zeros(config.worker.max_slots, dtype=np.bool_)
        self._any_constrained = False
        self._forces = config.drafts_forced
        self._late = config.drafter is not None and config.drafter.host
        self._device_caps = np.zeros(config.worker.max_slots, dtype=np.int32)

    def plan(self, step: int) -> Flight | None:
        """The step, or None where no request can have a row."""
        builder = StepBuilder(step)
        windows = self._batch.windows
        if windows is not None:
            windows.begin(step)
        retractions = self._counters.retractions
        self._plan_decode(builder)
        self._continue_prefill(builder)
        if self._counters.retractions == retractions:
            self._admit(builder)
        self._plan_verify(builder)
        if windows is not None and len(slots := builder.slots):
            builder.window = windows.changes(slots)
        return builder.build()

    def _plan_verify(self, builder: StepBuilder) -> None:
        """Decide how many of the step's drafts are verified."""
        if self._verify is None:
            return
        rows = builder.verify_rows
        if rows.slots and not builder.late_bound:
            tokens = len(rows.slots) // 4 + builder.prefill_tokens
            builder.budget = self._verify.plan(rows.slots, rows.q_caps, tokens)
        for init in builder.inits:
            self._verify.start(init.slot)

    def _plan_decode(self, builder: StepBuilder) -> None:
        batch = self._batch
        slots, room = batch.table.decodable(batch.decoding_slots(), self._max_drafts)
        if not len(slots):
            return
        late_bound, caps, widened = self._draft_caps(slots, room)
        wish = self._retraction.fit(slots, caps, self._settle, self._end)
        if wish.caps is not caps:
            self._explain(wish.slots)
            late_bound = widened = False
        rows = batch.table.plan_decode(builder.step, *wish, self._cache.allocator)
        self._counters.held_rows += rows.held_back
        self._admission.ratio.decay()
        slots = i32(rows.slots)
        if batch.windows is not None:
            batch.windows.verify(batch.table, slots, i32(rows.q_caps))
        accept_caps: I32 | None = None
        device_caps: I32 | None = None
        if self._caps_accepts:
            accept_caps = np.minimum(self._accept_caps[slots], i32(rows.q_caps) - 1)
        if widened:
            device_caps = np.minimum(self._device_caps[slots], i32(rows.q_caps) - 1)
        builder.decode(rows, self._reasons[slots], late_bound, accept_caps, device_caps)

    def _draft_caps(self, slots: I32, room: I32) -> tuple[bool, I32, bool]:
        """Whether the step waits for drafts, query tokens of each row, int32[n], and whether rows
        have more of them than the drafter may fill.
        """
        mine = self._to_force(slots, room)
        if self._policy is None:
            caps = self._plain_caps[: len(slots)]
            return False, caps if mine is None else _at_least(caps, mine, room + 1), False
        lengths = self._policy.plan(slots, room, len(slots) + self._prefill_ahead())
        self._reasons[slots] = lengths.reasons
        if self._caps_accepts:
            self._accept_caps[slots] = lengths.caps
            return False, np.clip(room, 0, self._max_drafts).astype(np.int32) + 1, False
        if mine is None:
            return lengths.late_bound, lengths.caps + 1, False
        wide = _at_least(lengths.caps, mine, room)
        if self._late:  # what is forced is known where drafts of the host are
            self._reasons[slots[mine]] = 0
            return True, wide + 1, False
        self._device_caps[slots] = lengths.caps
        return False, wide + 1, bool((wide > lengths.caps).any())

    def _to_force(self, slots: I32, room: I32) -> npt.NDArray[np.bool_] | None:
        """Rows upon which a grammar may force drafts; None if there is none."""
        if not self._any_constrained:
            return None
        mine: npt.NDArray[np.bool_] = self._constrained[slots] & (room > 0)
        return mine if mine.any() else None

    def _explain(self, slots: I32) -> None:
        """These rows lost their drafts to the lack of pages, unless they had none anyway."""
        reasons = self._reasons[slots]
        reasons[reasons == 0] = NO_PAGES
        self._reasons[slots] = reasons

    def _prefill_ahead(self) -> int:
        """Prefill tokens that the step will have, before admissions are known."""
        if not self._batch.prefilling and not len(self._queue):
            return 0
        table = self._batch.table
        ahead = sum(table.unfilled(running.slot) for running in self._batch.prefilling)
        if len(self._queue) and self._admission.slot_free():
            ahead += self._admission.next_waiting().request.length
        return min(ahead, self._config.chunk_tokens)

    def _continue_prefill(self, builder: StepBuilder) -> None:
        for running in list(self._batch.prefilling):
            if not self._add_chunk(builder, running):
                return

    def _admit(self, builder: StepBuilder) -> None:
        while len(self._queue) and builder.prefill_tokens < self._config.chunk_tokens:
            waiting = self._admission.next_waiting()
            admitted = self._admission.admit(waiting)
            if admitted is None:
                if self._use_priority:
                    self._preempt(waiting)
                return
            running, prefix = admitted
            self._count_entry(running, prefix.length)
            pages = self._batch.table.pages(running.slot)
            builder.init(slot_init(running, prefix, pages), pages)
            has_grammar = running.request.params.grammar is not None
            self._constrained[running.slot] = self._forces and has_grammar
            self._any_constrained = bool(self._constrained.any())
            self._add_chunk(builder, running)

    def _add_chunk(self, builder: StepBuilder, running: Running) -> bool:
        """Add what the budget allows of a request's prefill; False once it is spent."""
        budget = self._config.chunk_tokens - builder.prefill_tokens
        if budget <= 0:
            return False
        table, slot, request = self._batch.table, running.slot, running.request
        left = table.unfilled(slot)
        count = min(left, budget)
        last = count == left
        emits = last and request.generates
        start = table.plan_chunk(slot, count, builder.step, int(emits))
        kind = RowKind.PREFILL_LAST if emits else RowKind.PREFILL
        builder.chunk(slot, kind, start, request.tokens()[start : start + count])
        if self._batch.windows is not None:
            self._batch.windows.chunk(slot, start, start + count, table.pages(slot))
        self._counters.chunks += 1
        if last:
            self._batch.start_decoding(running)
        return True

    def _count_entry(self, running: Running, cached: int) -> None:
        progress = running.request.progress
        if progress.retractions == 0:
            progress.cached_tokens = cached
            self._counters.cached_tokens += cached
            self._counters.prompt_tokens += len(running.request.prompt)

    def _preempt(self, waiting: Waiting) -> None:
        """Retract requests of much lower priority, if that makes room for ``waiting``."""
        floor = waiting.request.priority - self._config.engine.priority_preemption_threshold
        lower = [r for r in self._batch.running if r.request.priority < floor]
        victims: list[Running] = []
        while not self._room_without(victims, waiting):
            if not lower:
                return
            victim = self._retraction.victim(lower)
            lower.remove(victim)
            victims.append(victim)
        for victim in victims:
            self._retraction.retract(victim)
            self._counters.preemptions += 1
        self._settle()

    def _room_without(self, victims: list[Running], waiting: Waiting) -> bool:
        """Whether ``waiting`` fits once the victims and all that drains have left."""
        batch = self._batch
        stay = [running for running in batch.running if running not in victims]
        slots = len(batch.free_slots) + len(batch.draining) + len(victims)
        pages = self._cache.available + batch.pages_to_come()
        pages += sum(batch.table.held(victim.slot) for victim in victims)
        fits = self._admission.demand(waiting.request, stay, 0) <= pages
        return fits and slots > 0 and len(stay) < self._config.max_running_requests


def _at_least(caps: I32, mine: npt.NDArray[np.bool_], room: I32) -> I32:
    """``caps`` int32[n], of the rows ``mine`` raised to all of their room."""
    raised: I32 = np.where(mine, np.maximum(caps, room), caps).astype(np.int32)
    return raised


def slot_init(running: Running, prefix: CachedPrefix, pages: I32) -> SlotInit:
    """What the worker needs of a request that enters a slot with its pages, int32[n]."""
    request = running.request
    scores = request.progress.prompt_scores
    copies: tuple[tuple[int, int], ...] = ()
    if prefix.source:
        copies = ((prefix.source, int(pages[len(prefix.pages)])),)
    return SlotInit(
        slot=running.slot,
        serial=running.serial,
        params=request.params,
        seed=request.seed,
        prompt=request.prompt.tobytes(),
        output=request.progress.tokens.tobytes(),
        cached_len=prefix.length,
        eos_ids=request.stop_ids,
        page_copies=copies,
        prompt_scores=scores.next if scores is not None and scores.missing else -1,
    )
