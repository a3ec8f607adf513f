"""Traces: what is recorded is replayed exactly, and every deviation and damage is named."""

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from outrider.engine_core.assembly import Assembly, assemble
from outrider.engine_core.messages import AddCorpus, FlushCache, GenerateRequest
from outrider.engine_core.plan import HostDrafts, StepPlan, StepResult
from outrider.engine_core.replay import (
    MAX_DIFFERENCES,
    RecordedWorker,
    ReplayReport,
    replay_core,
    replay_worker,
)
from outrider.engine_core.step_times import StepTimes
from outrider.engine_core.trace import (
    MAGIC,
    TRACE_VERSION,
    Frame,
    StepDone,
    TraceError,
    TraceFile,
    TraceHeader,
    TraceReader,
    TraceWriter,
)
from outrider.engine_core.worker import Worker, WorkerFailed

from .byte_tail import ByteTail
from .core_fixtures import make_config, request, run_all
from .fake_worker import FakeWorker

KNOTS = ((1, 1e-3), (64, 1.2e-3))


def replayed(header: TraceHeader, worker: Worker, writer: TraceWriter) -> Assembly:
    sizes, seconds = zip(*header.step_times, strict=True)
    return assemble(header.config, worker, StepTimes(sizes, seconds), ByteTail(), writer)


def fake_worker() -> FakeWorker:
    """Six tokens: n-grams repeat soon. 96 tokens of KV: the six requests do not fit at once."""
    return FakeWorker(num_pages=96, page_size=1, vocab_size=6)


def record(path: Path, overlap: bool) -> int:
    worker = fake_worker()
    config = make_config(
        worker,
        page_size=1,
        chunked_prefill_size=8,
        speculative_algorithm="NGRAM",
        enable_priority_scheduling=True,
        disable_overlap_schedule=not overlap,
    )
    header = TraceHeader(TRACE_VERSION, config, "fake", KNOTS)
    with contextlib.closing(TraceFile(path, header)) as file:
        made = replayed(header, worker, TraceWriter(file.write))
        asked: list[dict[str, object]] = [{"stop": ("abc",)}, {"logprobs": 1}, {}, {}]
        asked += [{"temperature": 1.0}, {"temperature": 1.0}]
        for i in range(6):
            copied = [t % 6 for t in range(i, i + 4)] * 2
            assert made.submit(request(f"r{i}", copied, 30, ignore_eos=True, **asked[i])) is None
        for _ in range(7):
            made.step()
        assert made.submit(request("urgent", [1, 2, 1], 60, ignore_eos=True, priority=20)) is None
        assert made.abort("r4")
        run_all(made.core)
        assert made.core.flush_cache() is None
        assert made.submit(request("late", [1, 2, 1, 2, 1, 2], 12, ignore_eos=True)) is None
        run_all(made.core)
        return made.core.scheduler.counters.retractions


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "synchronous"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace"
    assert record(path, bool(request.param)) > 0
    return path


def rewrite(source: Path, target: Path, change: Callable[[Frame], Frame | None]) -> None:
    """Copy a trace, with frames changed or left out."""
    reader = TraceReader(source)
    file = TraceFile(target, reader.header)
    for frame in reader:
        changed = change(frame)
        if changed is not None:
            file.write(changed)
    file.close()


def test_a_trace_holds_every_kind_of_frame(recorded: Path) -> None:
    kinds = {type(frame) for frame in TraceReader(recorded)}
    for kind in (GenerateRequest, FlushCache, StepPlan, HostDrafts, StepResult, StepDone):
        assert kind in kinds
    drafted = [f for f in TraceReader(recorded) if isinstance(f, HostDrafts) and f.tokens]
    assert drafted, "no step verified a draft"


def test_the_core_replays_exactly(recorded: Path) -> None:
    report = replay_core(TraceReader(recorded), replayed)
    assert report.differences == ()
    assert report.ok
    assert report.steps > 20


def test_the_worker_replays_exactly(recorded: Path) -> None:
    report = replay_worker(TraceReader(recorded), fake_worker())
    assert report.differences == ()
    assert report.steps > 20


def test_a_trace_cut_inside_a_step_replays_up_to_there(recorded: Path, tmp_path: Path) -> None:
    frames = list(TraceReader(recorded))
    last = max(i for i, frame in enumerate(frames) if isinstance(frame, StepPlan))
    seen = iter(range(len(frames)))
    rewrite(recorded, tmp_path / "cut", lambda f: f if next(seen) <= last else None)
    report = replay_core(TraceReader(tmp_path / "cut"), replayed)
    assert report.ok
    assert report.steps == sum(isinstance(frame, StepDone) for frame in frames[: last + 1])


def first_difference(path: Path, replay: Callable[[TraceReader], ReplayReport]) -> str:
    report = replay(TraceReader(path))
    assert not report.ok
    assert len(report.differences) <= MAX_DIFFERENCES
    return str(report.differences[0])


def core_difference(path: Path) -> str:
    return first_difference(path, lambda trace: replay_core(trace, replayed))


def nth(
    kind: type[Frame], n: int, change: Callable[[Frame], Frame | None]
) -> Callable[[Frame], Frame | None]:
    """Change the n-th frame of a kind."""
    seen = iter(range(10**9))

    def apply(frame: Frame) -> Frame | None:
        return change(frame) if type(frame) is kind and next(seen) == n else frame

    return apply


def test_a_changed_plan_is_named_by_step_and_field(recorded: Path, tmp_path: Path) -> None:
    changed = nth(StepPlan, 4, lambda f: msgspec.structs.replace(f, late_bound=not f.late_bound))  # type: ignore[union-attr]
    rewrite(recorded, tmp_path / "t", changed)
    assert core_difference(tmp_path / "t").startswith("step 5: StepPlan.late_bound: recorded ")


def test_a_changed_arrival_changes_a_plan(recorded: Path, tmp_path: Path) -> None:
    longer = nth(GenerateRequest, 0, lambda f: msgspec.structs.replace(f, prompt=bytes(40)))
    rewrite(recorded, tmp_path / "t", longer)
    assert "step 1: StepPlan." in core_difference(tmp_path / "t")


def test_changed_drafts_and_outputs_are_named(recorded: Path, tmp_path: Path) -> None:
    def other(frame: Frame) -> Frame:
        assert isinstance(frame, HostDrafts)
        return msgspec.structs.replace(frame, tokens=frame.tokens + bytes(4))

    rewrite(recorded, tmp_path / "t", nth(HostDrafts, 0, other))
    assert "HostDrafts.tokens" in core_difference(tmp_path / "t")
    rewrite(recorded, tmp_path / "u", nth(StepDone, 6, lambda f: StepDone(())))
    assert "StepDone.outputs" in core_difference(tmp_path / "u")


def test_missing_frames_are_named(recorded: Path, tmp_path: Path) -> None:
    rewrite(recorded, tmp_path / "t", nth(StepResult, 3, lambda f: None))
    report = replay_core(TraceReader(tmp_path / "t"), replayed)
    assert any("the trace lacks" in str(difference) for difference in report.differences)
    rewrite(recorded, tmp_path / "u", nth(StepPlan, 3, lambda f: None))
    assert "frame" in core_difference(tmp_path / "u")


def test_refused_events_are_named(recorded: Path, tmp_path: Path) -> None:
    twice = nth(GenerateRequest, 1, lambda f: msgspec.structs.replace(f, rid="r0"))
    rewrite(recorded, tmp_path / "t", twice)
    assert "GenerateRequest: recorded accepted, got refused" in core_difference(tmp_path / "t")
    empty = nth(FlushCache, 0, lambda f: AddCorpus(1, "x", ()))
    rewrite(recorded, tmp_path / "u", empty)
    assert "AddCorpus: recorded accepted" in core_difference(tmp_path / "u")


def test_a_result_that_the_core_does_not_collect_is_named(recorded: Path, tmp_path: Path) -> None:
    frames = list(TraceReader(recorded))
    result = next(f for f in frames if isinstance(f, StepResult))
    file = TraceFile(tmp_path / "t", TraceReader(recorded).header)
    file.write(result)
    file.write(StepDone(()))
    file.close()
    assert "StepResult: recorded collected" in str(
        replay_core(TraceReader(tmp_path / "t"), replayed).differences[-1]
    )


def test_a_worker_that_decides_otherwise_is_named(recorded: Path, tmp_path: Path) -> None:
    def other(frame: Frame) -> Frame:
        assert isinstance(frame, StepResult)
        return msgspec.structs.replace(frame, tokens=frame.tokens + bytes(4))

    rewrite(recorded, tmp_path / "t", nth(StepResult, 7, other))
    found = first_difference(tmp_path / "t", lambda trace: replay_worker(trace, fake_worker()))
    assert found.startswith("step 8: StepResult.tokens: recorded ")


def test_a_worker_wrong_everywhere_is_reported_in_short(recorded: Path, tmp_path: Path) -> None:
    def other(frame: Frame) -> Frame:
        if not isinstance(frame, StepResult):
            return frame
        return msgspec.structs.replace(frame, tokens=bytes(400), depths=b"")

    rewrite(recorded, tmp_path / "t", other)
    report = replay_worker(TraceReader(tmp_path / "t"), fake_worker())
    assert len(report.differences) == MAX_DIFFERENCES
    assert all(len(str(difference)) < 400 for difference in report.differences)


def test_a_replay_measures_nothing(recorded: Path) -> None:
    worker = RecordedWorker(TraceReader(recorded).header.config.worker)
    with pytest.raises(WorkerFailed, match="step_times"):
        worker.measure([1])
    assert worker.info().vocab_size == 6
    worker.shutdown()


def read_all(path: Path) -> tuple[int, int]:
    reader = TraceReader(path)
    for _ in reader:
        pass
    return reader.frames_read, reader.steps_read


def test_a_file_cut_anywhere_says_how_much_was_read(recorded: Path, tmp_path: Path) -> None:
    content = recorded.read_bytes()
    frames, steps = read_all(recorded)
    assert frames > steps > 20
    complete = 0
    for size in range(len(content) - 1, 0, -max(1, len(content) // 150)):
        (tmp_path / "t").write_bytes(content[:size])
        try:
            read_all(tmp_path / "t")
            complete += 1
        except TraceError as error:
            text = str(error)
            assert "not an Outrider trace" in text or "read " in text, text
    assert complete < 20, "only cuts between frames are complete files"
    (tmp_path / "t").write_bytes(content[:-3])
    reader = TraceReader(tmp_path / "t")
    with pytest.raises(TraceError, match=f"read {frames - 1} frames, {steps - 1} steps") as caught:
        list(reader)
    assert "cut short" in str(caught.value)


def test_damaged_files_are_refused(recorded: Path, tmp_path: Path) -> None:
    content = recorded.read_bytes()
    header_size = int(struct.unpack_from("<I", content, len(MAGIC))[0])
    first = len(MAGIC) + 4 + header_size
    damages = {
        "not an Outrider trace": b"x" + content[1:],
        "header is missing": MAGIC,
        "header is unreadable": MAGIC + struct.pack("<I", 3) + b"abc",
        "next frame is unreadable": content[:first] + struct.pack("<I", 3) + b"abc",
        "claims 4294967295 bytes": content[:first] + b"\xff" * 4 + b"abc",
        "a frame's length should be": content[:first] + b"\x01",
    }
    for words, damaged in damages.items():
        (tmp_path / "t").write_bytes(damaged)
        with pytest.raises(TraceError, match=words):
            read_all(tmp_path / "t")


def test_another_version_is_refused_by_number(recorded: Path, tmp_path: Path) -> None:
    header = msgspec.structs.replace(TraceReader(recorded).header, version=99)
    TraceFile(tmp_path / "t", header).close()
    with pytest.raises(TraceError, match=f"version 99; this build reads version {TRACE_VERSION}"):
        TraceReader(tmp_path / "t")


def test_the_file_is_complete_after_each_step_without_a_close(
    recorded: Path, tmp_path: Path
) -> None:
    file = TraceFile(tmp_path / "t", TraceReader(recorded).header)
    file.write(FlushCache(1))
    file.write(StepDone(()))
    assert read_all(tmp_path / "t") == (2, 1)
    file.close()
    file.close()
