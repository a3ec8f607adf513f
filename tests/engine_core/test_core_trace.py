"""What the core writes to a trace, and that a second core repeats it."""

from outrider.engine_core.core import EngineCore
from outrider.engine_core.messages import AbortRequest, FlushCache, GenerateRequest
from outrider.engine_core.plan import HostDrafts, StepPlan, StepResult
from outrider.engine_core.trace import Frame, StepDone, TraceWriter

from .core_fixtures import make_core, request, run_all
from .fake_worker import FakeWorker


def run_traced() -> list[Frame]:
    frames: list[Frame] = []
    core: EngineCore = make_core(FakeWorker(page_size=4), speculative_algorithm="NGRAM")
    core._trace = TraceWriter(frames.append)
    for i in range(3):
        assert core.submit(request(f"r{i}", range(1, 8 + i), 12, ignore_eos=True)) is None
    assert core.submit(request("r0", [1], 2)) is not None
    for _ in range(4):
        core.step()
    assert core.abort("r1")
    assert not core.abort("r9")
    run_all(core)
    assert core.flush_cache() is None
    return frames


def test_a_trace_holds_every_event_in_order() -> None:
    frames = run_traced()
    kinds = [type(frame) for frame in frames]
    assert kinds[:3] == [GenerateRequest] * 3
    assert kinds[-1] is FlushCache
    assert kinds.count(AbortRequest) == 1
    assert kinds.count(StepPlan) == kinds.count(StepResult) > 4
    assert kinds.count(StepDone) >= kinds.count(StepPlan)
    late = [frame.step for frame in frames if isinstance(frame, StepPlan) and frame.late_bound]
    assert late == [frame.step for frame in frames if isinstance(frame, HostDrafts)]
    assert late


def test_the_same_calls_give_the_same_trace() -> None:
    def timeless(frames: list[Frame]) -> list[Frame]:
        return [frame for frame in frames if not isinstance(frame, StepResult)]

    assert timeless(run_traced()) == timeless(run_traced())
