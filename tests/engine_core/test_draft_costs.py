"""Lengths where drafting takes time of its own: against the best that is known of the process."""

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from outrider.engine_core.assembly import Assembly, assemble, times_of
from outrider.engine_core.controller import NOT_PROFITABLE, TIMED_PLAIN
from outrider.engine_core.device_lengths import PROBE_EVERY, DeviceLengths
from outrider.engine_core.draft_estimates import TreeEstimates
from outrider.engine_core.ids import I32, RowKind, i32, u8
from outrider.engine_core.plan import StepPlan, StepResult
from outrider.engine_core.replay import replay_core
from outrider.engine_core.step_times import StepTimes, measure_drafting
from outrider.engine_core.trace import (
    TRACE_VERSION,
    TraceFile,
    TraceHeader,
    TraceReader,
    TraceWriter,
)
from outrider.engine_core.worker import Worker

from .core_fixtures import device_oracle, make_config, request, run_all
from .fake_worker import FakeWorker

WIDTH = 5
Seconds = Callable[[int], float]


class Process:
    """Rows whose drafts hold with probability ``p`` a level, on a machine with known times.

    ``told`` times what the machine takes is what was measured of ``drafting`` at the start.
    """

    def __init__(
        self, rows: int, p: float, plain: Seconds, drafting: Seconds, told: float = 1.0
    ) -> None:
        self.rows, self.p, self.plain, self.drafting = rows, p, plain, drafting
        self.slots = np.arange(rows, dtype=np.int32)
        self.room = np.full(rows, WIDTH, dtype=np.int32)
        self.rng = np.random.default_rng(rows)
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        self.times = StepTimes(sizes, [plain(n) for n in sizes])
        self.costs = StepTimes(sizes[:7], [told * drafting(n) for n in sizes[:7]])
        self.reached: Counter[str] = Counter()

    def lengths(
        self,
        trees: bool = False,
        policy: Literal["auto", "fixed"] = "auto",
        trims: bool = False,
    ) -> DeviceLengths:
        lengths = DeviceLengths(self.times, self.rows, WIDTH, policy, self.costs, trees, trims)
        for slot in self.slots.tolist():
            lengths.start(slot)
        return lengths

    def step(self, lengths: DeviceLengths) -> tuple[int, float, I32]:
        """Tokens emitted, seconds, and the caps of one step."""
        plan = lengths.plan(self.slots, self.room, self.rows)
        caps = plan.caps
        drafts = bool(caps.any())
        for code in np.unique(plan.reasons).tolist():
            self.reached[f"reason {code}"] += 1
        held = np.array(
            [min(int(self.rng.geometric(1 - self.p)) - 1, cap) for cap in caps], dtype=np.int32
        )
        tokens = self.rows + int(caps.sum())
        seconds = self.plain(tokens) + (self.drafting(self.rows) if drafts else 0.0)
        self.reached["drafted" if drafts else "plain"] += 1
        result = StepResult(1, b"", b"", b"", b"", busy_ns=int(seconds * 1e9), batch_tokens=tokens)
        lengths.observe(result, self.rows if drafts else 0)
        lengths.learn(self.slots, caps, held + 1)
        return self.rows + int(held.sum()), seconds, caps

    def run(self, lengths: DeviceLengths, steps: int) -> float:
        """Tokens per second."""
        self.reached.clear()
        done = [self.step(lengths) for _ in range(steps)]
        return sum(tokens for tokens, _, _ in done) / sum(seconds for _, seconds, _ in done)

    def best(self, whole: bool = False) -> float:
        """Of all fixed lengths, 0 among them; ``whole``: of none and all."""
        rates = [self.rows / self.plain(self.rows)]
        for length in (WIDTH,) if whole else range(1, WIDTH + 1):
            emitted = sum(self.p**level for level in range(length + 1))
            seconds = self.plain(self.rows * (1 + length)) + self.drafting(self.rows)
            rates.append(self.rows * emitted / seconds)
        return max(rates)


MACHINES: dict[str, tuple[Seconds, Seconds]] = {
    "weights": (lambda n: 6e-3 + 1e-6 * n, lambda n: 1e-3),
    "work": (lambda n: 1e-3 + 2e-4 * n, lambda n: 2e-4 + 5e-5 * n),
    "dear draft": (lambda n: 1e-3 + 1e-5 * n, lambda n: 3e-3),
    "knee": (lambda n: 1e-3 + max(0, n - 64) * 2e-5, lambda n: 3e-4 + 4e-6 * n),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.85])
@pytest.mark.parametrize("trees", [False, True])
def test_near_the_best_fixed_length_and_never_far_below_plain(
    machine: str, rows: int, p: float, trees: bool
) -> None:
    process = Process(rows, p, *MACHINES[machine])
    lengths = process.lengths(trees)
    process.run(lengths, 400)
    rate = process.run(lengths, 1500 // rows + 300)
    assert rate >= 0.96 * process.best(whole=trees)
    assert rate >= 0.98 * rows / process.plain(rows)


def test_a_wrong_measurement_of_drafting_is_corrected() -> None:
    """Told a tenth of what drafting takes, and ten times as much."""
    plain, drafting = MACHINES["dear draft"]
    for told, p, drafts in ((0.1, 0.7, False), (1.0, 0.7, False), (10.0, 0.97, True)):
        process = Process(8, p, plain, drafting, told)
        lengths = process.lengths()
        process.run(lengths, 3000)
        rate = process.run(lengths, 1500)
        assert rate >= 0.97 * process.best()
        assert (process.reached["drafted"] > 750) == drafts


def test_steps_of_the_other_kind_are_rare_and_say_why() -> None:
    process = Process(8, 0.85, *MACHINES["weights"])
    lengths = process.lengths()
    process.run(lengths, 1000)
    assert 5 <= process.reached["plain"] <= 1000 // PROBE_EVERY
    assert process.reached[f"reason {TIMED_PLAIN}"] == process.reached["plain"]
    process = Process(64, 0.1, *MACHINES["dear draft"])
    lengths = process.lengths()
    process.run(lengths, 2000)
    assert 2 <= process.reached["drafted"] <= 40
    assert process.reached[f"reason {NOT_PROFITABLE}"] == process.reached["plain"]


def test_fixed_lengths_draft_wherever_there_is_room() -> None:
    process = Process(64, 0.1, *MACHINES["dear draft"])
    process.run(process.lengths(policy="fixed"), 200)
    assert process.reached["plain"] == 0


def test_all_rows_of_a_step_draft_or_none() -> None:
    """A row whose drafts fail is cut to one draft, and a tree's rows are whole."""
    for trees, least in ((False, 1), (True, WIDTH)):
        process = Process(8, 0.9, *MACHINES["work"])
        lengths = process.lengths(trees)
        steps = 0
        for _ in range(300):
            plan = lengths.plan(process.slots, process.room, 8)
            held = np.where(process.slots == 0, 0, plan.caps).astype(np.int32)
            lengths.learn(process.slots, plan.caps, held + 1)
            drafts = bool(plan.caps.any())
            assert bool(plan.caps.all()) == drafts
            steps += drafts
        assert steps > 250
        last = plan.caps if plan.caps.any() else lengths.plan(process.slots, process.room, 8).caps
        assert last[0] == least
        assert last[1:].min() > least or trees


@pytest.mark.parametrize(("p", "drafts"), [(0.9, True), (0.02, False)])
def test_rows_that_a_planner_trims_are_whole_or_have_no_drafts(p: float, drafts: bool) -> None:
    """It knows of each draft what these lengths know of a request's drafts at that depth."""
    process = Process(8, p, *MACHINES["work"])
    cut, whole = process.lengths(), process.lengths(trims=True)
    for _ in range(300):
        for lengths in (cut, whole):
            plan = lengths.plan(process.slots, process.room, 8)
            assert lengths is cut or set(plan.caps.tolist()) in ({0}, {WIDTH})
            held = np.where(process.slots == 0, 0, plan.caps * drafts).astype(np.int32)
            lengths.learn(process.slots, plan.caps, held + 1)
    found = whole.weigh(process.slots, process.room, 8)
    assert found.caps.tolist() == [WIDTH * drafts] * 8
    assert bool(found.reasons.any()) == (not drafts)
    assert cut.weigh(process.slots, process.room, 8).caps[0] < WIDTH


def test_drafts_beside_prefill_must_earn_their_time() -> None:
    process = Process(8, 0.9, *MACHINES["work"])
    for trees in (False, True):
        lengths = process.lengths(trees)
        process.run(lengths, 200)
        alone = lengths.weigh(process.slots, process.room, 8)
        beside = lengths.weigh(process.slots, process.room, 200)
        assert alone.caps.any()
        assert beside.gain <= alone.gain


def test_a_trees_estimates_follow_what_held_by_width_and_request() -> None:
    trees = TreeEstimates(4, 15)
    slots, full = np.arange(4, dtype=np.int32), np.full(4, 15, dtype=np.int32)
    small = np.full(4, 2, dtype=np.int32)
    for _ in range(200):
        trees.learn(slots, full, np.array([5, 5, 5, 1], dtype=np.int32))
        trees.learn(slots, small, np.array([2, 2, 2, 0], dtype=np.int32))
    wide, narrow = trees.estimates(slots, full), trees.estimates(slots, small)
    assert wide[:3] == pytest.approx([5, 5, 5], rel=0.2)
    assert wide[3] < 2
    assert (narrow <= 2).all()
    assert narrow[3] < 0.7 < 1.4 < narrow[0]
    trees.start(3)
    assert trees.estimates(slots, full)[3] == pytest.approx(4, rel=0.1)


def test_drafting_is_measured_and_a_trace_replays(tmp_path: Path) -> None:
    worker = FakeWorker(num_pages=96, page_size=1, device_drafter=device_oracle(), draft_reach=9)
    costs = measure_drafting(worker, 8)
    assert costs.seconds(8) == pytest.approx(5.8e-4)
    config = make_config(
        worker,
        page_size=1,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=6,
        speculative_ngram_source="gpu",
    )
    assert config.drafter is not None
    assert config.drafter.drafting_takes_time
    steps = ((1, 2e-5), (64, 3e-5))
    header = TraceHeader(TRACE_VERSION, config, "fake", steps, costs.knots)

    def build(header: TraceHeader, worker: Worker, writer: TraceWriter) -> Assembly:
        times, drafting = times_of(header.step_times), times_of(header.draft_times)
        return assemble(header.config, worker, times, None, writer, drafting)

    with contextlib.closing(TraceFile(tmp_path / "trace", header)) as file:
        core = build(header, worker, TraceWriter(file.write))
        for i in range(6):
            assert core.submit(request(f"r{i}", range(1, 9), 60, ignore_eos=True)) is None
        run_all(core.core)
    report = replay_core(TraceReader(tmp_path / "trace"), build)
    assert report.steps > 60
    assert report.ok, [str(difference) for difference in report.differences]
    plans = [frame for frame in TraceReader(tmp_path / "trace") if isinstance(frame, StepPlan)]
    assert max(i32(plan.q_caps)[u8(plan.kinds) == RowKind.VERIFY].max(initial=0) for plan in plans)
