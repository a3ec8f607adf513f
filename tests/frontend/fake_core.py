"""A scripted core behind a real ROUTER socket: it speaks the wire protocol and runs no model.

A prompt is answered by its own tokens over and over, so the expected text is known; a request
ends at ``max_new_tokens``, at a stop token, or when a stop string appears.
"""

import asyncio
import contextlib
from array import array
from itertools import cycle, islice
from pathlib import Path

import zmq
import zmq.asyncio

from outrider.engine_core.ids import i32
from outrider.engine_core.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddCorpus,
    CallReply,
    CoreError,
    CoreInfo,
    CoreStats,
    FinishReason,
    FlushCache,
    FromCore,
    GenerateRequest,
    GetStats,
    Hello,
    ListCorpora,
    Outputs,
    Ready,
    RemoveCorpus,
    RequestOutput,
    RequestStats,
    Shutdown,
    decode_to_core,
    encode,
)
from outrider.engine_core.plan import TokenLogprobs
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "models" / "pycoder-11m"
TOKENIZER = Tokenizer(MODEL)
TOKEN = "secret"

INFO = CoreInfo(
    model="models/pycoder-11m",
    vocab_size=8192,
    context_length=512,
    eos_ids=(0,),
    max_total_tokens=4096,
    page_size=16,
    max_running_requests=8,
    drafter="NGRAM",
    num_draft_tokens=12,
    num_threads=1,
    device="cpu",
    dtype="float32",
    weight_bytes=1,
    pid=1,
)


class FakeCore:
    """``slow``: seconds between tokens. ``block``: tokens of one output of a stream."""

    def __init__(self, folder: Path, info: CoreInfo = INFO) -> None:
        self.endpoint = f"ipc://{folder}/core"
        self.info = info
        self.slow = 0.002
        self.block = 3
        self.fail_after: int | None = None  # tokens after which every request fails in the core
        self.priorities = True
        self.refusal: Refused | None = None  # the answer to every request
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.corpora: dict[str, tuple[int, str | None]] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self._peers: set[bytes] = set()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        # A router throws away what a client that lags has no room for.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Vanish, as a killed process does."""
        for task in (self._task, *self.running.values()):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._socket.close(0)

    async def send_garbage(self) -> None:
        """Send every client a frame of no protocol."""
        for peer in self._peers:
            await self._socket.send_multipart([peer, b"\xc1garbage"])

    async def _serve(self) -> None:
        while True:
            peer, frame = await self._socket.recv_multipart()
            self._peers.add(peer)
            message = decode_to_core(frame)
            match message:
                case Hello(version=version, token=token):
                    if token != TOKEN or version != PROTOCOL_VERSION:
                        await self._send(peer, CoreError(Refused("token", "is wrong", 401)))
                    else:
                        await self._send(peer, Ready(PROTOCOL_VERSION, self.info))
                case GenerateRequest() if message.priority and not self.priorities:
                    refused = Refused("priority", "needs --enable-priority-scheduling")
                    await self._send(peer, CoreError(refused, message.rid))
                case GenerateRequest() if self.refusal is not None:
                    await self._send(peer, CoreError(self.refusal, message.rid))
                case GenerateRequest():
                    self.requests.append(message)
                    self.running[message.rid] = asyncio.create_task(self._run(peer, message))
                case AbortRequest(rid=rid, all_requests=every):
                    for one in list(self.running) if every else [rid]:
                        await self._abort(peer, one)
                case Refused():
                    await self._send(peer, CoreError(message))
                case Shutdown():
                    pass
                case _:
                    await self._send(peer, self._answer(message))

    def _answer(
        self, call: FlushCache | GetStats | AddCorpus | RemoveCorpus | ListCorpora
    ) -> CallReply | CoreStats:
        match call:
            case GetStats():
                return self._stats(call.call)
            case FlushCache():
                busy = Refused("flush_cache", "requests are running") if self.running else None
                return CallReply(call.call, busy, "flushed")
            case AddCorpus(name=name, documents=documents, tenant=tenant):
                if name in self.corpora:
                    return CallReply(call.call, Refused("corpus_id", f"{name} exists already"))
                count = sum(len(d) // 4 for d in documents) + len(documents) - 1
                self.corpora[name] = (count, tenant)
                return CallReply(call.call, None, "loaded", {name: count})
            case RemoveCorpus(name=name):
                self.corpora.pop(name, None)
                return CallReply(call.call, None, "removed")
            case ListCorpora():
                return CallReply(call.call, None, "", {k: v[0] for k, v in self.corpora.items()})

    def _stats(self, call: int) -> CoreStats:
        values: dict[str, int | float | tuple[int, ...]] = dict.fromkeys(
            CoreStats.__struct_fields__, 0
        )
        values |= {
            "call": call,
            "running": len(self.running),
            "free_pages": 200,
            "total_pages": 256,
            "spec_drafts": 10,
            "spec_draft_tokens": 40,
            "spec_accepted_tokens": 20,
            "spec_verify_tokens": 30,
            "spec_accepted_per_pos": (12, 8),
            "spec_drafted_per_pos": (20, 20),
        }
        return CoreStats(**values)  # type: ignore[arg-type]

    async def _abort(self, peer: bytes, rid: str) -> None:
        task = self.running.pop(rid, None)
        if task is None:
            return
        self.aborted.append(rid)
        task.cancel()
        finish = FinishReason("abort", message="aborted by the client")
        await self._send(peer, Outputs((RequestOutput(rid, b"", (), finish, stats(1, 0)),)))

    async def _run(self, peer: bytes, request: GenerateRequest) -> None:
        params = request.params
        prompt = i32(request.prompt).tolist()
        tokens, finish = script(prompt, request)
        size = self.block if request.stream else max(len(tokens), 1)
        for start in range(0, max(len(tokens), 1), size):
            part = tokens[start : start + size]
            await asyncio.sleep(self.slow * max(len(part), 1))
            last = start + size >= len(tokens)
            if self.fail_after is not None and start + len(part) > self.fail_after:
                last, finish = True, FinishReason("abort", message="the numbers broke", status=500)
            await self._send(
                peer,
                Outputs(
                    (
                        RequestOutput(
                            rid=request.rid,
                            tokens=array("i", part).tobytes(),
                            logprobs=logprobs(part, params.logprobs),
                            finish=finish if last else None,
                            stats=stats(len(prompt), start + len(part)) if last else None,
                            prompt_logprobs=() if start else prompt_scores(prompt, params),
                        ),
                    )
                ),
            )
            if last:
                break
        self.running.pop(request.rid, None)

    async def _send(self, peer: bytes, message: FromCore) -> None:
        await self._socket.send_multipart([peer, encode(message)])


def script(prompt: list[int], request: GenerateRequest) -> tuple[list[int], FinishReason]:
    """What the fake core generates for a prompt, and why it stops."""
    params = request.params
    tokens: list[int] = []
    for token in islice(cycle(prompt), params.max_new_tokens):
        tokens.append(token)
        if token in params.stop_token_ids:
            return tokens, FinishReason("stop", token)
        text = TOKENIZER.decode(tokens)
        for stop in params.stop:
            if stop in text:
                return tokens, FinishReason("stop", stop)
    return tokens, FinishReason("length")


def logprobs(tokens: list[int], top: int | None) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of -0.5 for each token, and ``top`` alternatives."""
    if top is None:
        return ()
    ids = array("i", range(100, 100 + top)).tobytes()
    values = array("f", [-1.0 - rank for rank in range(top)]).tobytes()
    return tuple(TokenLogprobs(token, -0.5, ids, values, 7) for token in tokens)


def prompt_scores(prompt: list[int], params: SamplingParams) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of :func:`logprobs`, of the prompt's tokens that are to have some."""
    return logprobs(prompt[max(1, params.logprob_start_len) :], params.prompt_logprobs)


def stats(prompt_tokens: int, completion_tokens: int) -> RequestStats:
    """Counters as if every second token had been an accepted draft."""
    return RequestStats(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=2,
        retractions=1,
        verify_ct=4,
        verify_tokens=10,
        correct_drafts=6,
        proposed_drafts=12,
        plain_ct=3,
        histogram=(1, 0, 3),
        spec_off_reason=None,
    )


def expected_text(prompt: str, max_tokens: int) -> str:
    """Text of the fake core's answer to a prompt."""
    return TOKENIZER.decode(list(islice(cycle(TOKENIZER.encode(prompt)), max_tokens)))
