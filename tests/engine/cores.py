"""Whole engines on tiny models: built by the engine's own builder, driven to the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.engine.build import Engine, build_engine, build_worker
from outrider.engine_core.assembly import assemble_replay
from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.controller import LengthController
from outrider.engine_core.core import EngineCore
from outrider.engine_core.grammar_compiler import compiler_of
from outrider.engine_core.host_drafter import HostProposal
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest, RequestOutput
from outrider.engine_core.processor_loader import processors_of
from outrider.engine_core.refusal import Refused
from outrider.engine_core.replay import replay_core, replay_worker
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import StepTimes
from outrider.engine_core.trace import TraceReader


def tiny_config(model: Path, algorithm: str | None = None, **fields: object) -> EngineConfig:
    """On a CPU, also where there is a GPU: whoever builds one looks at it with CPU tensors."""
    values: dict[str, object] = {
        "model": str(model),
        "device": "cpu",
        "num_threads": 1,
        "page_size": 16,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "speculative_algorithm": algorithm,
        "speculative_length_policy": "auto" if algorithm is None else "fixed",
        **fields,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


@contextmanager
def running_engine(config: EngineConfig) -> Iterator[Engine]:
    engine = build_engine(config)
    try:
        yield engine
    finally:
        engine.shutdown()


def request(rid: str, prompt: Sequence[int], params: SamplingParams) -> GenerateRequest:
    return GenerateRequest(rid, np.array(prompt, np.int32).tobytes(), params, stream=False)


def drive(core: EngineCore, requests: Sequence[GenerateRequest]) -> dict[str, list[RequestOutput]]:
    """Submit all and step until nothing is left; outputs by request."""
    for message in requests:
        refused = core.submit(message)
        assert refused is None, refused
    outputs: dict[str, list[RequestOutput]] = {message.rid: [] for message in requests}
    while core.has_work:
        for output in core.step():
            outputs[output.rid].append(output)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in i32(output.tokens).tolist()]


class RandomDrafter:
    """Proposes random chains or trees of random tokens, and remembers nothing."""

    def __init__(self, vocab_size: int, width: int, tree: bool, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._width = width
        self._tree = tree

    def open(
        self, slot: int, namespace: str, prompt: NDArray[np.int32], learn: bool = True
    ) -> None:
        """Nothing to keep."""

    def extend(
        self, slots: NDArray[np.int32], cu: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> None:
        """Nothing to keep."""

    def close(self, slot: int) -> None:
        """Nothing to keep."""

    def flush(self) -> None:
        """Nothing to forget."""

    @property
    def node_count(self) -> int:
        return 0

    def propose(self, slots: NDArray[np.int32], caps: NDArray[np.int32]) -> HostProposal:
        rows, rng = len(slots), self._rng
        counts = np.minimum(caps, self._width).astype(np.int32)
        tokens = rng.integers(0, self._vocab_size, (rows, self._width)).astype(np.int32)
        parents = np.broadcast_to(np.arange(self._width, dtype=np.int32), tokens.shape).copy()
        if self._tree:  # breadth first: a few children of the bonus token, then of node 1, …
            for row in range(rows):
                parents[row] = np.sort(rng.integers(0, np.arange(1, self._width + 1)))
        return HostProposal(
            counts,
            tokens,
            parents,
            np.ones(rows, np.int32),
            np.full(tokens.shape, 0.5, np.float32),
        )


@contextmanager
def random_draft_core(config: EngineConfig, tree: bool) -> Iterator[EngineCore]:
    """The engine of a NGRAM configuration with its proposer replaced by random drafts."""
    worker = build_worker(config)
    try:
        resolved = resolve_config(config, worker.info())
        assert not isinstance(resolved, Refused)
        worker.prepare(resolved)
        times = StepTimes([1, 64], [1e-3, 2e-3])
        width = resolved.draft_width - 1
        controller = LengthController(times, worker.info().max_slots, width, "fixed")
        drafter = RandomDrafter(worker.info().vocab_size, width, tree)
        yield EngineCore(
            resolved,
            worker,
            host_drafter=drafter,
            controller=controller,
            grammars=compiler_of(resolved),
            processors=processors_of(resolved),
            check=False,
        )
    finally:
        worker.shutdown()


def assert_replays(path: Path) -> None:
    """Both halves of a trace again: the core's plans, and a worker's results."""
    report = replay_core(TraceReader(path), assemble_replay)
    assert report.ok, report.differences
    assert report.steps > 10
    trace = TraceReader(path)
    worker = build_worker(trace.header.config.engine)
    try:
        worker.prepare(trace.header.config)
        report = replay_worker(trace, worker)
    finally:
        worker.shutdown()
    assert report.ok, report.differences


def submit(core: EngineCore, messages: Sequence[GenerateRequest]) -> None:
    """None of them may be refused."""
    for message in messages:
        assert core.submit(message) is None


def finish_all_but(core: EngineCore, aborted: str) -> dict[str, list[int]]:
    """Tokens of what was submitted, of which one is aborted after four steps; some must be
    retracted on the way.
    """
    got: dict[str, list[int]] = {}
    for step in range(600):
        if step == 4:
            core.abort(aborted)
        for output in core.step():
            got.setdefault(output.rid, []).extend(i32(output.tokens).tolist())
        if not core.has_work:
            break
    assert core.scheduler.counters.retractions > 0
    return got
