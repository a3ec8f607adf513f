"""Drafts from the device through the core: tokens, pages, counters, reasons, lengths, replay."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.engine_core import admission
from outrider.engine_core.assembly import Assembly, assemble
from outrider.engine_core.controller import (
    DRAFTS,
    NO_ROOM,
    NOT_PROFITABLE,
    OFF_BY_REQUEST,
    BoundDrafts,
    StepLengths,
)
from outrider.engine_core.device_drafts import DeviceDrafts
from outrider.engine_core.device_lengths import PROBE_EVERY, DeviceLengths
from outrider.engine_core.ids import I32, RowKind, i32
from outrider.engine_core.mixed_lengths import MixedLengths
from outrider.engine_core.plan import StepPlan, StepResult
from outrider.engine_core.replay import replay_core
from outrider.engine_core.step_times import StepTimes
from outrider.engine_core.trace import (
    TRACE_VERSION,
    TraceFile,
    TraceHeader,
    TraceReader,
    TraceWriter,
)
from outrider.engine_core.worker import Worker

from .core_fixtures import (
    assert_all_pages_back,
    device_oracle,
    expected,
    make_config,
    make_core,
    request,
    run_all,
)
from .fake_worker import FakeWorker

SOURCES = ("gpu", "both")


def flags(source: str, **others: object) -> dict[str, Any]:
    return {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 6,
        "speculative_ngram_source": source,
        **others,
    }


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("policy", ["fixed", "auto"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("pages", "page_size"), [(1024, 1), (64, 16)])
def test_requests_get_their_own_continuation(
    source: str, policy: str, overlap: bool, pages: int, page_size: int
) -> None:
    worker = FakeWorker(num_pages=pages, page_size=page_size, device_drafter=device_oracle())
    core = make_core(
        worker,
        right_of_8=2,
        policy=policy,
        disable_overlap_schedule=not overlap,
        chunked_prefill_size=16,
        **flags(source),
    )
    messages = [
        request(f"r{i}", range(1, 5 + 4 * i), 20 + i, ignore_eos=i % 2 == 0) for i in range(12)
    ]
    for message in messages:
        assert core.submit(message) is None
    got = run_all(core)
    counters = core.scheduler.counters
    for message in messages:
        tokens, finish = expected(message, 256, 50)
        client = got[message.rid]
        assert client.tokens == tokens
        assert client.finish is not None
        assert client.finish.kind == finish
    assert_all_pages_back(core)
    assert worker.mixed_steps > 0
    assert counters.spec_accepted_tokens > 50
    assert counters.spec_draft_tokens > counters.spec_accepted_tokens


@pytest.mark.parametrize("source", SOURCES)
def test_the_retracted_come_back(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    worker = FakeWorker(num_pages=60, page_size=1, max_slots=16, device_drafter=device_oracle())
    core = make_core(worker, right_of_8=2, **flags(source))
    messages = [request(f"r{i}", range(1 + i, 9 + i), 30, ignore_eos=True) for i in range(6)]
    for message in messages:
        assert core.submit(message) is None
    got = run_all(core)
    for message in messages:
        assert got[message.rid].tokens == expected(message, 256, 50)[0]
    assert core.scheduler.counters.retractions > 0
    assert core.scheduler.counters.shrunk_steps > 0
    assert_all_pages_back(core)


@pytest.mark.parametrize("source", SOURCES)
def test_aborts_free_everything(source: str) -> None:
    worker = FakeWorker(num_pages=200, page_size=4, device_drafter=device_oracle())
    core = make_core(worker, **flags(source))
    for i in range(10):
        assert core.submit(request(f"r{i}", range(1, 9), 40)) is None
    for step in range(30):
        core.step()
        if step % 3 == 0:
            core.abort(f"r{step // 3}")
    run_all(core)
    assert_all_pages_back(core)


def test_steps_wait_for_the_host_only_where_it_drafts() -> None:
    worker = FakeWorker(device_drafter=device_oracle())
    core = make_core(worker, **flags("gpu"))
    assert core.submit(request("a", range(1, 9), 20, ignore_eos=True)) is None
    seen, upload = [], worker.upload_drafts
    worker.upload_drafts = lambda drafts: (seen.append(drafts), upload(drafts))  # type: ignore
    run_all(core)
    assert not seen
    core = make_core(worker, right_of_8=0, **flags("both"))
    assert core.submit(request("b", range(1, 9), 20, ignore_eos=True)) is None
    run_all(core)
    assert seen
    caps, counts = (np.concatenate([i32(getattr(d, name)) for d in seen])
                    for name in ("device_caps", "counts"))  # fmt: skip
    assert not (caps[counts > 0]).any()


def test_a_row_without_a_match_says_so() -> None:
    worker = FakeWorker(device_drafter=lambda slot, cap: [])
    core = make_core(worker, **flags("gpu"))
    assert core.submit(request("a", range(1, 9), 20, ignore_eos=True)) is None
    assert core.submit(request("b", range(1, 9), 20, ignore_eos=True, speculative=False)) is None
    got = run_all(core)
    reasons = {rid: got[rid].last.stats.spec_off_reason for rid in "ab"}  # type: ignore
    assert reasons == {"a": "no match", "b": "request switched it off"}
    assert core.scheduler.counters.spec_drafts == 0


@pytest.mark.parametrize("source", SOURCES)
def test_a_trace_of_device_drafts_replays(source: str, tmp_path: Path) -> None:
    worker = FakeWorker(num_pages=96, page_size=1, device_drafter=device_oracle())
    config = make_config(worker, page_size=1, **flags(source, speculative_length_policy="auto"))
    header = TraceHeader(TRACE_VERSION, config, "fake", ((1, 1e-3), (64, 1.2e-3)))

    def build(header: TraceHeader, worker: Worker, writer: TraceWriter) -> Assembly:
        sizes, seconds = zip(*header.step_times, strict=True)
        return assemble(header.config, worker, StepTimes(sizes, seconds), None, writer)

    with contextlib.closing(TraceFile(tmp_path / "trace", header)) as file:
        made = build(header, worker, TraceWriter(file.write))
        for i in range(5):
            assert made.submit(request(f"r{i}", [i, 1, 2, 1, 2], 25, ignore_eos=True)) is None
        run_all(made.core)
        assert made.core.scheduler.counters.spec_accepted_tokens > 10
    report = replay_core(TraceReader(tmp_path / "trace"), build)
    assert report.differences == ()
    assert report.steps > 10


def lengths(slope: float, policy: str = "auto") -> DeviceLengths:
    """T grows by ``slope`` of a plain step a token."""
    times = StepTimes([1, 101], [1e-3, 1e-3 * (1 + 100 * slope)])
    return DeviceLengths(times, 4, 7, policy)  # type: ignore[arg-type]


SLOTS = np.arange(3, dtype=np.int32)
ROOM = np.array([7, 3, -1], dtype=np.int32)


def test_fixed_lengths_draft_in_full() -> None:
    plan = lengths(10.0, "fixed").plan(SLOTS, ROOM, 3)
    assert not plan.late_bound
    assert plan.caps.tolist() == [7, 3, 0]
    assert plan.reasons.tolist() == [DRAFTS, DRAFTS, OFF_BY_REQUEST]
    nothing = lengths(0.0).plan(SLOTS, np.zeros(3, dtype=np.int32), 3)
    assert nothing.reasons.tolist() == [NO_ROOM] * 3


def test_lengths_follow_what_held() -> None:
    """Where verify is cheap all is drafted, where drafts fail nothing, but for a probe."""
    cheap = lengths(1e-4)
    for slot in SLOTS.tolist():
        cheap.start(slot)
    full = np.full(3, 7, dtype=np.int32)
    for _ in range(60):
        plan = cheap.plan(SLOTS, full, 3)
        cheap.learn(SLOTS, plan.caps, np.minimum(plan.caps + 1, [8, 8, 1]).astype(np.int32))
    assert plan.caps[0] == plan.caps[1] == 7
    assert plan.caps[2] < 7
    assert plan.gain > 2
    dear = lengths(0.4)
    for slot in SLOTS.tolist():
        dear.start(slot)
    drafted = 0
    for _ in range(10 * PROBE_EVERY):
        plan = dear.plan(SLOTS, full, 3)
        assert (plan.caps > 0).any() == (plan.reasons != NOT_PROFITABLE).any()
        drafted += bool(plan.caps.any())
        dear.learn(SLOTS, plan.caps, np.ones(3, dtype=np.int32))
    assert 8 <= drafted <= 25
    for _ in range(40 * PROBE_EVERY):  # the text turns into what the drafter knows
        plan = dear.plan(SLOTS, full, 3)
        dear.learn(SLOTS, plan.caps, plan.caps + 1)
    assert plan.caps.tolist() == [7, 7, 7]


def hopeless() -> DeviceLengths:
    """Lengths that learned that no draft of slots 0 and 1 holds."""
    dear = lengths(0.4)
    full = np.full(2, 7, dtype=np.int32)
    for slot in (0, 1):
        dear.start(slot)
    for _ in range(PROBE_EVERY // 2):
        dear.learn(SLOTS[:2], full, np.ones(2, dtype=np.int32))
    assert not dear.weigh(SLOTS[:2], full, 2).caps.any()
    return dear


def test_weighing_counts_nothing() -> None:
    dear, full = hopeless(), np.full(2, 7, dtype=np.int32)
    for turn in range(1, 3 * PROBE_EVERY + 1):
        assert not dear.weigh(SLOTS[:2], full, 2).caps.any()
        assert bool(dear.plan(SLOTS[:2], full, 2).caps.any()) == (turn % PROBE_EVERY == 0)


class OneTree:
    """A host that waits for every step and has a tree for row 0, for row 1 in one step of ten."""

    def __init__(self) -> None:
        self.steps = 0

    def plan(self, slots: I32, room: I32, _: int) -> StepLengths:
        return StepLengths(True, room, np.zeros(len(slots), dtype=np.uint8), 2.0)

    def bind(self, slots: I32, _caps: I32, _tokens: int, _rows: int) -> BoundDrafts:
        self.steps += 1
        counts = np.array([1, self.steps % 10 == 0], dtype=np.int32)
        nodes = np.ones(int(counts.sum()), dtype=np.int32)
        reasons = np.where(counts > 0, 0, NOT_PROFITABLE).astype(np.uint8)
        return BoundDrafts(counts, nodes, nodes - 1, reasons)


def test_rows_without_a_tree_are_probed_where_every_step_waits_for_the_host() -> None:
    dear, full = hopeless(), np.full(2, 7, dtype=np.int32)
    mixed = MixedLengths(OneTree(), dear)  # type: ignore[arg-type]
    probed = []
    for step in range(1, 400):
        assert mixed.plan(SLOTS[:2], full, 2).late_bound
        bound = mixed.bind(SLOTS[:2], full, 2, 2)
        assert bound.device_caps is not None
        assert bound.device_caps[0] == 0
        if bound.device_caps[1]:
            probed.append(step)
            assert bound.reasons[1] == 0
    # Nine steps in ten have a row that the device could draft for.
    gaps = np.diff(probed)
    assert len(probed) >= 10
    assert all(PROBE_EVERY <= gap <= PROBE_EVERY + 5 for gap in gaps)


def test_partial_caps_teach_no_failure() -> None:
    short = lengths(1e-4)
    short.start(0)
    one, cap = SLOTS[:1], np.array([2], dtype=np.int32)
    for _ in range(50):
        short.learn(one, cap, cap + 1)
    assert short.plan(one, np.array([7], dtype=np.int32), 1).caps.tolist() == [7]


def test_what_a_grammar_forced_teaches_the_drafters_lengths_nothing() -> None:
    """Rows of it, and rows that the drafter had no room in, are left out."""
    seen = list[tuple[list[int], list[int]]]()

    class Lengths:
        learns = True

        def observe(self, result: StepResult, drafting_rows: int) -> None:
            assert drafting_rows == 4

        def learn(self, slots: I32, caps: I32, accept_lens: I32) -> None:
            seen.append((slots.tolist(), caps.tolist()))

    def ints(*values: int) -> bytes:
        return np.array(values, dtype=np.int32).tobytes()

    plan = StepPlan(
        1, False, ints(0, 1, 2, 3), bytes([RowKind.VERIFY] * 4), ints(4, 4, 6, 6),
        ints(-1, -1, -1, -1), b"", (), b"", b"", b"", device_caps=ints(3, 3, 0, 2),
    )  # fmt: skip
    result = StepResult(
        1, ints(4, 2, 6, 2), ints(*range(14)), ints(3, 3, 5, 2), ints(3, 3, 5, 2),
        forced=ints(3, 0, 5, 0),
    )  # fmt: skip
    DeviceDrafts(Lengths(), alone=True).committed(plan, result)  # type: ignore[arg-type]
    assert seen == [([0, 1, 2, 3], [0, 3, 0, 2])]
