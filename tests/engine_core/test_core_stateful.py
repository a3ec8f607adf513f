"""The whole core against a plain model: any order of submit, abort and step.

The model is that every request gets its own continuation (:func:`expected`), up to where it was
aborted, whatever else happens. Counters at the end prove that the rare paths were taken.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from outrider.engine_core import admission
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.request import Draining, Running, Waiting

from ..stateful import run_until_reached
from .core_fixtures import (
    Got,
    assert_all_pages_back,
    device_oracle,
    expected,
    make_core,
    request,
    run_all,
    take,
)
from .fake_worker import FakeWorker

CONTEXT = 96
VOCAB = 40
REACHED: Counter[str] = Counter()


@dataclass
class Shape:
    """One configuration of the machine."""

    page_size: int
    num_tokens: int
    overlap: bool
    source: str | None
    policy: str = "fcfs"
    priority: bool = False
    radix: bool = True
    reach: int = 0
    shifts: bool = False


shapes = st.builds(
    Shape,
    page_size=st.sampled_from([1, 4, 16]),
    num_tokens=st.sampled_from([96, 112, 160, 160, 224, 512]),
    overlap=st.booleans(),
    source=st.sampled_from([None, "cpu", "cpu", "gpu", "both"]),
    policy=st.sampled_from(["fcfs", "lpm"]),
    priority=st.booleans(),
    radix=st.sampled_from([True, True, True, False]),
)

# Of drafters with KV in the target's pages.
kv_shapes = st.builds(
    Shape,
    page_size=st.sampled_from([1, 4, 4, 16]),
    num_tokens=st.sampled_from([160, 224, 512]),
    overlap=st.booleans(),
    source=st.sampled_from(["gpu", "both"]),
    priority=st.booleans(),
    reach=st.sampled_from([6, 20]),
    shifts=st.sampled_from([True, True, False]),
)


class CoreMachine(RuleBasedStateMachine):
    @initialize(shape=shapes, chunk=st.sampled_from([3, 8, 32, -1]), slots=st.integers(2, 6))
    def start(self, shape: Shape, chunk: int, slots: int) -> None:
        self.begin(shape, chunk, slots)

    def begin(self, shape: Shape, chunk: int, slots: int) -> None:
        self.worker = FakeWorker(
            num_pages=shape.num_tokens // shape.page_size,
            page_size=shape.page_size,
            max_slots=slots,
            vocab_size=VOCAB,
            context_length=CONTEXT,
            device_drafter=device_oracle(VOCAB),
            draft_reach=shape.reach,
            shifts_tokens=shape.shifts,
        )
        flags: dict[str, Any] = {}
        if shape.source is not None:
            flags = {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": 6,
                "speculative_ngram_source": shape.source,
            }
        self.core = make_core(
            self.worker,
            disable_overlap_schedule=not shape.overlap,
            disable_radix_cache=not shape.radix,
            chunked_prefill_size=chunk,
            schedule_policy=shape.policy,
            enable_priority_scheduling=shape.priority,
            priority_preemption_threshold=2 if shape.priority else 10,
            **flags,
        )
        self.shape = shape
        self.messages: dict[str, GenerateRequest] = {}
        self.aborted: set[str] = set()
        self.got: dict[str, Got] = {}

    @rule(
        copies=st.integers(1, 3),
        family=st.integers(0, 2),
        length=st.integers(1, 60),
        max_new=st.sampled_from([0, 1, 2, 9, 20, 33, 60]),
        ignore_eos=st.booleans(),
        stops=st.sampled_from([(), ("ab", "c"), ("xyz", "q")]),
        stop_ids=st.sampled_from([(), (5, 6, 7, 8)]),
        priority=st.integers(0, 6),
        min_new=st.sampled_from([0, 0, 3]),
        logprobs=st.sampled_from([None, None, 0]),
        seed=st.sampled_from([None, 11]),
        speculative=st.sampled_from([True, True, True, False]),
        stream=st.booleans(),
    )
    def submit(
        self,
        copies: int,
        family: int,
        length: int,
        max_new: int,
        ignore_eos: bool,
        stops: tuple[str, ...],
        stop_ids: tuple[int, ...],
        priority: int,
        min_new: int,
        logprobs: int | None,
        seed: int | None,
        speculative: bool,
        stream: bool,
    ) -> None:
        for copy in range(copies):
            message = request(
                f"r{len(self.messages)}",
                [(family * 7 + i * (family + 1)) % VOCAB for i in range(length + copy)],
                max_new,
                ignore_eos=ignore_eos,
                stop=stops,
                stop_token_ids=stop_ids,
                priority=priority if self.shape.priority else 0,
                min_new_tokens=min(min_new, max_new),
                logprobs=logprobs,
                seed=seed,
                temperature=0.0 if seed is None else 1.0,
                speculative=speculative,
                stream=stream,
                cache_salt="other" if family == 2 else "",
            )
            self.submit_one(message)

    @rule(length=st.integers(1, 20), max_new=st.integers(25, 70), steps=st.integers(8, 24))
    def press(self, length: int, max_new: int, steps: int) -> None:
        """More long requests than the pool can hold, then one of high priority."""
        for i in range(4):
            rid = f"r{len(self.messages)}"
            self.submit_one(request(rid, range(i, i + length), max_new, ignore_eos=True))
        self.step(steps)
        priority = 6 if self.shape.priority else 0
        rid = f"r{len(self.messages)}"
        self.submit_one(request(rid, range(length), 9, priority=priority))
        self.step(4)

    def submit_one(self, message: GenerateRequest) -> None:
        refused = self.core.submit(message)
        length = len(message.prompt) // 4
        stored = max(length, min(length + message.params.max_new_tokens, CONTEXT) - 1)
        assert (refused is None) == (stored <= self.capacity), refused
        if refused is None:
            self.messages[message.rid] = message

    @property
    def capacity(self) -> int:
        return self.shape.num_tokens // self.shape.page_size * self.shape.page_size

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.core.has_work:
                return
            before = self.snapshot()
            take(self.got, self.core.step())
            self.notice(before)

    @precondition(lambda self: self.core.scheduler.batch.states)
    @rule(data=st.data(), steps=st.integers(0, 3), count=st.integers(1, 4))
    def abort(self, data: st.DataObject, steps: int, count: int) -> None:
        for _ in range(count):
            self.step(steps)
            if self.core.scheduler.batch.states:
                self.abort_one(data)

    def abort_one(self, data: st.DataObject) -> None:
        scheduler = self.core.scheduler
        states = scheduler.batch.states
        flying = {f for flight in scheduler.flights for f in flight.slots.tolist()}
        prefer = [r for r, s in states.items() if not isinstance(s, Waiting) and s.slot in flying]
        choice = prefer if prefer and data.draw(st.integers(0, 2)) == 0 else states
        rid = data.draw(st.sampled_from(sorted(choice)))
        state = scheduler.batch.states[rid]
        match state:
            case Waiting():
                REACHED["abort waiting"] += 1
            case Running():
                in_flight = scheduler.batch.table.last_step(state.slot) > scheduler.done_step
                REACHED["abort running"] += 1
                REACHED["abort in flight"] += in_flight
                if state in scheduler.batch.prefilling:
                    REACHED["abort prefilling"] += 1
            case Draining():
                REACHED["abort retracted in flight"] += 1
        assert self.core.abort(rid)
        assert not self.core.abort(rid)
        self.aborted.add(rid)

    def snapshot(self) -> tuple[int, ...]:
        c = self.core.scheduler.counters
        return (c.retractions, c.preemptions, c.dropped_rows, c.held_rows, c.shrunk_steps)

    def notice(self, before: tuple[int, ...]) -> None:
        names = ("retraction", "preemption", "dropped row", "held row", "shrunk step")
        for name, old, new in zip(names, before, self.snapshot(), strict=True):
            REACHED[name] += new - old

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        before = self.snapshot()
        run_all(self.core, self.got)
        self.notice(before)
        for rid, message in self.messages.items():
            self.judge(rid, message)
        counters = self.core.scheduler.counters
        REACHED["partial acceptance"] += self.worker.partial_accepts
        REACHED["accepted draft"] += counters.spec_accepted_tokens
        if self.shape.source is not None:
            REACHED[f"drafts of {self.shape.source}"] += counters.spec_drafts
        if self.worker.draft_kv is not None:
            REACHED["drafted ahead of a row"] += self.worker.draft_kv.ahead
            REACHED["stale page end"] += self.worker.draft_kv.stale
        REACHED["page copy"] += self.worker.page_copies
        REACHED["eviction"] += self.core.scheduler.cache.evicted_pages
        REACHED["mixed step"] += self.worker.mixed_steps
        REACHED["cache hit"] += counters.cached_tokens > 0
        REACHED["chunked prefill"] += self.worker.partial_chunks
        assert_all_pages_back(self.core)

    def judge(self, rid: str, message: GenerateRequest) -> None:
        client = self.got[rid]
        seed = self.seed_of(message)
        tokens, finish = expected(message, CONTEXT, VOCAB, seed)
        assert client.finish is not None
        assert client.last is not None
        stats = client.last.stats
        assert stats is not None
        if rid in self.aborted:
            assert client.finish.kind == "abort"
            assert client.tokens == tokens[: len(client.tokens)]
            return
        assert client.tokens == tokens
        assert client.finish.kind == finish
        assert stats.completion_tokens == len(tokens)
        assert client.logprobs == (len(tokens) if message.params.logprobs is not None else 0)
        assert message.stream or client.outputs == 1
        emitted = stats.verify_tokens + stats.plain_ct + (1 if tokens else 0)
        assert emitted + stats.retractions >= len(tokens) >= emitted - 1 - stats.plain_ct
        assert sum(stats.histogram) == stats.verify_ct
        if finish == "stop" and stats.correct_drafts and len(tokens) > 1:
            REACHED["stop after drafts"] += 1
        if stats.verify_tokens < stats.correct_drafts + stats.verify_ct:
            REACHED["cut inside an accepted run"] += 1

    def seed_of(self, message: GenerateRequest) -> int:
        return message.params.seed or 0


class DraftKVMachine(CoreMachine):
    @initialize(shape=kv_shapes, chunk=st.sampled_from([3, 8, 32, -1]), slots=st.integers(2, 6))
    def start(self, shape: Shape, chunk: int, slots: int) -> None:
        self.begin(shape, chunk, slots)


@pytest.mark.no_cover  # the tracer makes it three times as slow; coverage stands without it
def test_core_against_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    REACHED.clear()
    # Looks only so many new tokens ahead, so that small pools are overcommitted.
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 6)
    rare = [
        "retraction",
        "preemption",
        "eviction",
        "partial acceptance",
        "cut inside an accepted run",
        "abort waiting",
        "abort running",
        "abort in flight",
        "chunked prefill",
        "dropped row",
        "drafts of gpu",
        "drafts of both",
    ]
    run_until_reached(CoreMachine, REACHED, rare, examples=25, steps=30)


@pytest.mark.no_cover
def test_drafters_with_kv_against_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    REACHED.clear()
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 6)
    rare = [
        "retraction",
        "abort in flight",
        "page copy",
        "drafted ahead of a row",
        "stale page end",
    ]
    run_until_reached(DraftKVMachine, REACHED, rare, examples=25, steps=30)
