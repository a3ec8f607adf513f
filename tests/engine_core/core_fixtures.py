"""Making cores over a fake worker, and the continuation that every request must get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from outrider.engine_core.config import CoreConfig, EngineConfig, resolve_config
from outrider.engine_core.controller import LengthController
from outrider.engine_core.core import EngineCore
from outrider.engine_core.device_lengths import DeviceLengths
from outrider.engine_core.drafter_spec import DraftKV
from outrider.engine_core.host_drafter import HostProposal
from outrider.engine_core.ids import i32
from outrider.engine_core.late_drafts import DraftPolicy
from outrider.engine_core.messages import FinishReason, GenerateRequest, RequestOutput
from outrider.engine_core.mixed_lengths import MixedLengths
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import StepTimes

from .fake_worker import FakeWorker, Slot, choose, extend_hash


class LetterTail:
    """A tail decoder whose token t is the letter chr(97 + t % 26)."""

    def visible(self, token: int, skip_special_tokens: bool) -> bool:
        return True

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return letters(tokens)


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


class OracleDrafter:
    """A host drafter that knows the fake model and is right with a fixed frequency.

    Its trees branch: next to a right token it puts a wrong sibling. It asserts that it is told of
    every committed token.
    """

    def __init__(self, worker: FakeWorker, width: int, right_of_8: int = 5) -> None:
        self.worker = worker
        self.width = width
        self.right_of_8 = right_of_8
        self.texts: dict[int, list[int]] = {}
        self.proposals = 0

    def open(
        self, slot: int, namespace: str, prompt: npt.NDArray[np.int32], learn: bool = True
    ) -> None:
        assert slot not in self.texts, "opened twice"
        self.texts[slot] = prompt.tolist()

    def extend(
        self,
        slots: npt.NDArray[np.int32],
        cu: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
    ) -> None:
        for row, slot in enumerate(slots.tolist()):
            self.texts[slot].extend(tokens[cu[row] : cu[row + 1]].tolist())

    def close(self, slot: int) -> None:
        del self.texts[slot]

    def propose(self, slots: npt.NDArray[np.int32], caps: npt.NDArray[np.int32]) -> HostProposal:
        rows, nodes = len(slots), self.width - 1
        out = HostProposal(
            np.zeros(rows, np.int32),
            np.zeros((rows, nodes), np.int32),
            np.zeros((rows, nodes), np.int32),
            np.full(rows, 3, np.int32),
            np.zeros((rows, nodes), np.float32),
        )
        for row, slot in enumerate(slots.tolist()):
            self._tree(slot, int(caps[row]), out, row)
        return out

    def flush(self) -> None:
        pass

    @property
    def node_count(self) -> int:
        return sum(len(text) for text in self.texts.values())

    def _tree(self, slot: int, cap: int, out: HostProposal, row: int) -> None:
        init = self.worker.slots[slot].init
        text = self.texts[slot]
        prefix = 0
        for token in text:
            prefix = extend_hash(prefix, token)
        parent, made = 0, len(text) - len(init.prompt) // 4
        count, weight = 0, 0.9
        vocab = self.worker.info().vocab_size
        while count < cap:
            self.proposals += 1
            right = choose(prefix, vocab, init.params, init.seed, made)
            wrong = (right + 1) % vocab
            tokens = [right, wrong] if self.proposals * 5 % 8 < self.right_of_8 else [wrong]
            for token in tokens[: cap - count]:
                out.tokens[row, count], out.parents[row, count] = token, parent
                out.weights[row, count] = weight / len(tokens)
                count += 1
            parent = count - (len(tokens) if count < cap or len(tokens) == 1 else 1) + 1
            if tokens[0] == wrong or out.tokens[row, parent - 1] != right:
                break
            prefix = extend_hash(prefix, right)
            made += 1
            weight /= 2
        out.counts[row] = count


def device_oracle(vocab: int = 50) -> Callable[[Slot, int], list[int]]:
    """Right most of the time, now and then wrong at some depth, short of its cap or empty."""

    def draft(slot: Slot, cap: int) -> list[int]:
        turn, prefix, chain = len(slot.tokens), slot.hashes[-1], list[int]()
        for depth in range((0, 1, cap, cap, cap)[turn % 5]):
            made = turn + depth - slot.prompt_len
            right = choose(prefix, vocab, slot.init.params, slot.init.seed, made)
            chain.append((right + (turn % 3 == 1 and depth == 2)) % vocab)
            prefix = extend_hash(prefix, chain[-1])
        return chain

    return draft


@dataclass
class Got:
    """What a client received."""

    tokens: list[int] = field(default_factory=list)
    logprobs: int = 0
    outputs: int = 0
    finish: FinishReason | None = None
    last: RequestOutput | None = None


def take(got: dict[str, Got], outputs: list[RequestOutput]) -> None:
    """Add outputs to what clients received; nothing may follow a finish."""
    for output in outputs:
        client = got.setdefault(output.rid, Got())
        assert client.finish is None, "an output after the finish"
        client.tokens.extend(i32(output.tokens).tolist())
        client.logprobs += len(output.logprobs)
        client.outputs += 1
        client.finish = output.finish
        assert (output.finish is None) == (output.stats is None)
        client.last = output


def make_config(worker: FakeWorker, **flags: object) -> CoreConfig:
    """The drafter on the device is one with KV if the worker's has some."""
    engine = EngineConfig(model="fake", **flags)  # type: ignore[arg-type]
    config = resolve_config(engine, worker.info())
    assert not isinstance(config, Refused), str(config)
    kv = worker.draft_kv
    if kv is None or config.drafter is None or not config.drafter.on_device:
        return config
    spec = msgspec.structs.replace(
        config.drafter, draft_kv=DraftKV.SHARED_SLOTS, shifts_tokens=kv.shifts
    )
    return msgspec.structs.replace(config, drafter=spec, draft_reach=kv.reach)


def make_core(
    worker: FakeWorker, *, right_of_8: int = 5, policy: str = "fixed", **flags: object
) -> EngineCore:
    """A checked core; NGRAM on the host gets the oracle drafter."""
    config = make_config(worker, **flags)
    drafter: OracleDrafter | None = None
    controller: DraftPolicy | None = None
    lengths: DeviceLengths | None = None
    if config.drafter is not None:
        times = StepTimes([1, 512], [1e-3, 1.1e-3])
        sizes = (times, worker.info().max_slots, config.draft_width - 1, policy)
        if config.drafter.on_device:
            lengths = DeviceLengths(*sizes)  # type: ignore[arg-type]
        if config.drafter.host:
            drafter = OracleDrafter(worker, config.draft_width, right_of_8)
            host = LengthController(*sizes)  # type: ignore[arg-type]
            controller = host if lengths is None else MixedLengths(host, lengths)
    return EngineCore(
        config,
        worker,
        host_drafter=drafter,
        tail=LetterTail(),
        controller=controller,
        device_lengths=lengths,
        check=True,
    )


def request(
    rid: str, prompt: "list[int] | range", max_new: int = 8, **fields: object
) -> GenerateRequest:
    """A greedy request; fields of SamplingParams and of the message may be mixed."""
    message_fields = {"priority", "cache_salt", "stream", "speculative"}
    message = {k: v for k, v in fields.items() if k in message_fields}
    params = {"temperature": 0.0, "max_new_tokens": max_new}
    params |= {k: v for k, v in fields.items() if k not in message_fields}  # type: ignore[misc]
    return GenerateRequest(
        rid=rid,
        prompt=np.array(list(prompt), dtype=np.int32).tobytes(),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        **message,  # type: ignore[arg-type]
    )


def expected(
    message: GenerateRequest, context_length: int, vocab_size: int, seed: int = 0
) -> tuple[list[int], str]:
    """Continuation and finish kind of a request alone, from the rules in plain words."""
    params = message.params
    prompt: list[int] = i32(message.prompt).tolist()
    prefix = 0
    for token in prompt:
        prefix = extend_hash(prefix, token)
    out: list[int] = []
    cap = min(params.max_new_tokens, context_length - len(prompt))
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {0})
    while len(out) < cap:
        token = choose(prefix, vocab_size, params, seed, len(out))
        prefix = extend_hash(prefix, token)
        out.append(token)
        if len(out) <= params.min_new_tokens:
            continue
        text = letters(out)
        if any(s in text[max(0, params.min_new_tokens - len(s) + 1) :] for s in params.stop):
            return out, "stop"
        if token in stops:
            return out, "stop"
    return out, "length"


def run_all(
    core: EngineCore, got: dict[str, Got] | None = None, limit: int = 5000
) -> dict[str, Got]:
    """Step until nothing is left."""
    got = {} if got is None else got
    while core.has_work:
        take(got, core.step())
        limit -= 1
        assert limit > 0, "the core makes no progress"
    return got


def assert_all_pages_back(core: EngineCore) -> None:
    """Nothing is leased: every page is free or an evictable part of the radix tree."""
    cache = core.scheduler.cache
    assert cache.tree.locked_pages == 0
    assert cache.available == cache.total
    assert core.flush_cache() is None
    assert cache.allocator.free_pages == cache.total
