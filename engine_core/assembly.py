"""A core put together with its drafter, controller and tail decoder, live or for a replay."""

from dataclasses import dataclass
from typing import assert_never, final

from ..cython_ext.suffix_automaton import SuffixAutomaton
from .config import CoreConfig, EngineConfig
from .controller import LengthController
from .core import EngineCore
from .corpora import CorpusError, build_corpus
from .device_lengths import DeviceLengths
from .drafter_loader import make_host_drafter
from .grammar_compiler import compiler_of
from .host_drafter import HostDrafter
from .ids import i32
from .late_drafts import DraftPolicy
from .messages import AddCorpus, FlushCache, GenerateRequest, RemoveCorpus, RequestOutput
from .mixed_lengths import MixedLengths
from .ngram import NgramProposer
from .processor_loader import processors_of
from .refusal import Refused, RefusedError
from .step_times import StepTimes
from .tail_decoder import TailDecoder, TokenizersTail
from .tokenizer_file import tokenizer_file
from .trace import Control, TraceHeader, TraceWriter
from .worker import Worker

NO_NGRAM = Refused(
    "speculative_algorithm",
    "external corpora need --speculative-algorithm NGRAM and its source on the host "
    "(--speculative-ngram-source cpu or both)",
    400,
)


@final
@dataclass(frozen=True, slots=True)
class Assembly:
    """A core and what is reached beside it. ``proposer`` is NGRAM's, which alone has corpora."""

    core: EngineCore
    proposer: NgramProposer | None
    trace: TraceWriter | None

    def submit(self, message: GenerateRequest) -> Refused | None:
        """Queue a request."""
        return self.core.submit(message)

    def abort(self, rid: str) -> bool:
        """End a request."""
        return self.core.abort(rid)

    def step(self) -> list[RequestOutput]:
        """One iteration. Raises WorkerFailed."""
        return self.core.step()

    def control(self, message: Control) -> Refused | None:
        """Flush, or change corpora at once; an added one is built before this returns."""
        match message:
            case FlushCache():
                return self.core.flush_cache()
            case AddCorpus():
                try:
                    built = build_corpus([i32(document) for document in message.documents])
                except CorpusError as error:
                    return Refused("corpus", str(error))
                return self.install_corpus(message, built)
            case RemoveCorpus():
                return self.remove_corpus(message)
            case _:
                assert_never(message)

    def install_corpus(self, message: AddCorpus, built: SuffixAutomaton) -> Refused | None:
        """Propose from a corpus that was built of the message's documents, from now on."""
        if self.proposer is None:
            return NO_NGRAM
        try:
            self.proposer.corpora.install(message.name, built, message.tenant)
        except CorpusError as error:
            return Refused("corpus", str(error))
        if self.trace is not None:
            self.trace.control(message)
        return None

    def remove_corpus(self, message: RemoveCorpus) -> Refused | None:
        """Drop a corpus; one that is not there is fine."""
        if self.proposer is None:
            return NO_NGRAM
        if self.proposer.corpora.remove(message.name) and self.trace is not None:
            self.trace.control(message)
        return None


def assemble(
    config: CoreConfig,
    worker: Worker,
    times: StepTimes | None,
    tail: TailDecoder | None,
    trace: TraceWriter | None,
    drafting: StepTimes | None = None,
) -> Assembly:
    """Put a core together; ``times`` are needed with a drafter. Raises ValueError without.

    ``drafting``: a draft model's seconds by rows, which ``times`` are without. Raises RefusedError
    for a drafter that cannot be made.
    """
    drafter: HostDrafter | None = None
    controller: DraftPolicy | None = None
    device: DeviceLengths | None = None
    if config.drafter is not None:
        if times is None:
            raise ValueError("a drafter needs the worker's step times")
        slots, nodes = config.worker.max_slots, config.draft_width - 1
        policy = config.engine.speculative_length_policy
        if config.drafter.on_device:
            trees = config.draft_topk > 1
            trims = config.ragged.trims
            device = DeviceLengths(times, slots, nodes, policy, drafting, trees, trims)
        if config.drafter.host:
            made = make_host_drafter(config.drafter, config.engine)
            if isinstance(made, Refused):
                raise RefusedError(made)
            drafter = made
            host = LengthController(times, slots, nodes, policy)
            controller = host if device is None else MixedLengths(host, device)
    core = EngineCore(
        config,
        worker,
        host_drafter=drafter,
        tail=tail,
        controller=controller,
        device_lengths=device,
        grammars=compiler_of(config),
        processors=processors_of(config),
        trace=trace,
    )
    proposer = drafter if isinstance(drafter, NgramProposer) else None
    return Assembly(core, proposer, trace)


def assemble_replay(header: TraceHeader, worker: Worker, trace: TraceWriter) -> Assembly:
    """The core that a trace's header describes, for :func:`~.replay.replay_core`."""
    times = times_of(header.step_times)
    drafting = times_of(header.draft_times)
    return assemble(header.config, worker, times, load_tail(header.config.engine), trace, drafting)


def times_of(knots: tuple[tuple[int, float], ...]) -> StepTimes | None:
    """The table that a trace's header has; None for none. Raises ValueError."""
    if not knots:
        return None
    sizes, seconds = zip(*knots, strict=True)
    return StepTimes(sizes, seconds)


def load_tail(config: EngineConfig) -> TailDecoder | None:
    """The decoder for stop strings; None without a tokenizer.json or with skip_tokenizer_init.

    Raises ModelNotFound, ValueError or OSError when the tokenizer cannot be read.
    """
    path = tokenizer_file(config)
    return None if path is None else TokenizersTail(str(path))
