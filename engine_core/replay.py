"""Replay of traces: of the core against recorded results, of a worker against recorded plans."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, final

from .messages import AbortRequest, FlushCache, GenerateRequest, RequestOutput
from .plan import HostDrafts, StepPlan, StepResult
from .refusal import Refused
from .trace import Control, Event, Frame, StepDone, TraceHeader, TraceReader, TraceWriter
from .worker import Worker, WorkerFailed, WorkerInfo

MAX_DIFFERENCES = 20
WORKER_FIELDS = ("step", "accept_lens", "tokens", "proposed", "depths", "errors")


class Difference(NamedTuple):
    """One deviation: the step (0: before the first), the frame's field, both values as text."""

    step: int
    field: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.field}: recorded {self.recorded}, got {self.replayed}"


class ReplayReport(NamedTuple):
    """Outcome: steps compared, and the first differences (none: an exact replay)."""

    steps: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether everything was reproduced."""
        return not self.differences


class ReplayableCore(Protocol):
    """The part of ``EngineCore`` that a replay drives."""

    def submit(self, message: GenerateRequest) -> Refused | None:
        """Queue a request."""
        ...

    def abort(self, rid: str) -> bool:
        """End a request."""
        ...

    def control(self, message: Control) -> Refused | None:
        """Flush or change corpora."""
        ...

    def step(self) -> list[RequestOutput]:
        """One iteration."""
        ...


MakeCore = Callable[[TraceHeader, Worker, TraceWriter], ReplayableCore]


class _Comparison:
    def __init__(self) -> None:
        self.differences: list[Difference] = []
        self.step = 0

    @property
    def full(self) -> bool:
        return len(self.differences) >= MAX_DIFFERENCES

    def add(self, field: str, recorded: object, replayed: object) -> None:
        if not self.full:
            texts = (_short(recorded), _short(replayed))
            self.differences.append(Difference(self.step, field, *texts))

    def frames(self, recorded: Frame, replayed: Frame) -> None:
        """Compare two frames field by field."""
        name = type(recorded).__name__
        if type(recorded) is not type(replayed):
            self.add("frame", name, type(replayed).__name__)
            return
        self.fields(recorded, replayed, recorded.__struct_fields__)

    def fields(self, recorded: Frame, replayed: Frame, names: Iterable[str]) -> None:
        for field in names:
            was, now = getattr(recorded, field), getattr(replayed, field)
            if was != now:
                self.add(f"{type(recorded).__name__}.{field}", was, now)


def _short(value: object) -> str:
    if isinstance(value, bytes):
        text = f"{len(value)} bytes {value[:48].hex()}"
        return text + ("…" if len(value) > 48 else "")
    text = str(value)
    return text if len(text) <= 120 else text[:119] + "…"


@final
class RecordedWorker:
    """A worker that answers with recorded results. Raises WorkerFailed when they run out."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self._results: list[StepResult] = []

    def expect(self, result: StepResult) -> None:
        """Queue the answer to a ``collect``."""
        self._results.append(result)

    @property
    def pending(self) -> int:
        """Results not yet collected."""
        return len(self._results)

    def info(self) -> WorkerInfo:
        """The recorded sizes."""
        return self._info

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        """Refused: a replay takes its step times from the header."""
        raise WorkerFailed("a replay does not measure; use the header's step_times")

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Refused, as ``measure``."""
        raise WorkerFailed("a replay does not measure; use the header's draft_times")

    def launch(self, plan: StepPlan) -> None:
        """The plan itself is compared through the core's trace hooks."""

    def upload_drafts(self, drafts: HostDrafts) -> None:
        """The drafts are compared through the core's trace hooks."""

    def collect(self) -> StepResult:
        """The next recorded result."""
        if not self._results:
            raise WorkerFailed("the core collects a result that the trace lacks")
        return self._results.pop(0)

    def reset(self) -> None:
        """Nothing is kept."""

    def shutdown(self) -> None:
        """Nothing runs."""


def replay_core(trace: TraceReader, make_core: MakeCore) -> ReplayReport:
    """Feed a fresh core the recorded arrivals and results; compare every plan, draft and output.

    ``make_core(header, worker, writer)`` builds the core with the header's configuration and
    step times, on ``worker``, with ``writer`` as its trace. Stops at the first step that differs,
    since all later ones would. Raises TraceError for a damaged file.
    """
    worker = RecordedWorker(trace.header.config.worker)
    made: list[Frame] = []
    core = make_core(trace.header, worker, TraceWriter(made.append))
    compared = _Comparison()
    steps = 0
    for recorded in _by_step(trace):
        made.clear()
        for frame in recorded:
            if isinstance(frame, StepPlan):
                compared.step = frame.step
            elif isinstance(frame, StepResult):
                worker.expect(frame)
        failure = _replay_step(core, recorded, compared)
        _compare_lists(recorded, made, compared)
        if failure is not None:
            compared.add("step", "a result that fits", failure)
        if worker.pending:
            compared.add("StepResult", "collected", "not collected")
        if compared.differences:
            break
        steps += 1
    return ReplayReport(steps, tuple(compared.differences))


def _replay_step(core: ReplayableCore, recorded: list[Frame], compared: _Comparison) -> str | None:
    """Apply the events and step once; how the step failed, if it did."""
    for frame in recorded:
        if isinstance(frame, Event) and not _apply(core, frame):
            compared.add(type(frame).__name__, "accepted", "refused")
    try:
        core.step()
    except WorkerFailed as error:
        return str(error)
    return None


def _apply(core: ReplayableCore, event: Event) -> bool:
    match event:
        case GenerateRequest():
            return core.submit(event) is None
        case AbortRequest():
            return core.abort(event.rid)
        case _:
            return core.control(event) is None


def _by_step(trace: TraceReader) -> Iterator[list[Frame]]:
    """The frames up to and with each StepDone; a last step without one was never finished."""
    frames: list[Frame] = []
    for frame in trace:
        frames.append(frame)
        if isinstance(frame, StepDone):
            yield frames
            frames = []


def _compare_lists(recorded: list[Frame], made: list[Frame], compared: _Comparison) -> None:
    for was, now in zip(recorded, made, strict=False):
        compared.frames(was, now)
    if len(recorded) != len(made):
        compared.add("frames", _names(recorded), _names(made))


def _names(frames: list[Frame]) -> str:
    return " ".join(type(frame).__name__ for frame in frames)


def replay_worker(trace: TraceReader, worker: Worker) -> ReplayReport:
    """Run the recorded plans on a real worker; compare what every step decided.

    Times and log-probabilities are not compared: they may differ between machines. Raises
    TraceError for a damaged file, WorkerFailed if the worker does.
    """
    compared = _Comparison()
    steps = 0
    for frame in trace:
        match frame:
            case StepPlan():
                worker.launch(frame)
            case HostDrafts():
                worker.upload_drafts(frame)
            case StepResult():
                compared.step = frame.step
                compared.fields(frame, worker.collect(), WORKER_FIELDS)
                steps += 1
            case FlushCache():
                worker.reset()
            case _:
                pass
        if compared.full:
            break
    return ReplayReport(steps, tuple(compared.differences))
