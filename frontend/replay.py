"""Replay of a trace: the core from recorded arrivals and results, and the model from its plans.

The core part builds scheduler, drafter and controller from the trace's header alone and needs no
model; the worker part loads the model and must decide the same tokens again.
"""

from pathlib import Path
from typing import final

from ..engine_core.config import CoreConfig
from ..engine_core.controller import LengthController
from ..engine_core.core import EngineCore
from ..engine_core.corpora import CorpusError, build_corpus
from ..engine_core.ids import i32
from ..engine_core.messages import AddCorpus, FlushCache, GenerateRequest, RequestOutput
from ..engine_core.model_path import resolve_model
from ..engine_core.ngram import NgramProposer
from ..engine_core.refusal import Refused
from ..engine_core.replay import ReplayReport, replay_core
from ..engine_core.step_times import StepTimes
from ..engine_core.tail_decoder import TokenizersTail
from ..engine_core.trace import Control, TraceHeader, TraceReader, TraceWriter
from ..engine_core.worker import Worker


@final
class ReplayCore:
    """An engine core that takes a trace's controls beside its requests."""

    def __init__(self, header: TraceHeader, worker: Worker, writer: TraceWriter) -> None:
        config = header.config
        self._writer = writer
        self._proposer: NgramProposer | None = None
        controller: LengthController | None = None
        if config.drafter is not None:
            self._proposer = NgramProposer(config.engine.ngram())
            sizes, seconds = zip(*header.step_times, strict=True)
            controller = LengthController(
                StepTimes(sizes, seconds),
                config.worker.max_slots,
                config.draft_width - 1,
                config.engine.speculative_length_policy,
            )
        self._core = EngineCore(
            config,
            worker,
            host_drafter=self._proposer,
            tail=_tail(config),
            controller=controller,
            trace=writer,
        )

    def submit(self, message: GenerateRequest) -> Refused | None:
        """Queue a request."""
        return self._core.submit(message)

    def abort(self, rid: str) -> bool:
        """End a request."""
        return self._core.abort(rid)

    def control(self, message: Control) -> Refused | None:
        """Flush, or change the corpora."""
        if isinstance(message, FlushCache):
            return self._core.flush_cache()
        if self._proposer is None:
            return Refused("corpus", "the trace changes corpora without a drafter")
        corpora = self._proposer.corpora
        if isinstance(message, AddCorpus):
            automaton = build_corpus([i32(document) for document in message.documents])
            try:
                corpora.install(message.name, automaton, message.tenant)
            except CorpusError as error:
                return Refused("corpus", str(error))
        else:
            corpora.remove(message.name)
        self._writer.control(message)
        return None

    def step(self) -> list[RequestOutput]:
        """One iteration."""
        return self._core.step()


def _tail(config: CoreConfig) -> TokenizersTail | None:
    engine = config.engine
    folder = (
        Path(engine.tokenizer_path).expanduser()
        if engine.tokenizer_path is not None
        else resolve_model(engine.model, engine.revision)
    )
    path = folder / "tokenizer.json"
    return TokenizersTail(str(path)) if path.is_file() else None


def replay_trace(path: str) -> ReplayReport:
    """Run the recorded arrivals and results through a new core; compare plans and commits.

    Raises TraceError for a file that is no trace, ModelNotFound for a missing tokenizer.
    """
    return replay_core(TraceReader(path), ReplayCore)
