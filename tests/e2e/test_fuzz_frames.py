"""Fuzzed ZeroMQ frames: the decoders never raise, a live core and its gateway never die."""

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine_core.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddCorpus,
    CoreStats,
    FlushCache,
    GenerateRequest,
    GetStats,
    Hello,
    ListCorpora,
    Outputs,
    RemoveCorpus,
    Shutdown,
    ToCore,
    decode_to_core,
    encode,
)
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend import client_messages as sdk
from outrider.frontend.launch import CoreProcess

from .wire import SDK_TOKEN, RawPeer, RunningGateway, pack, raw_peer, running_core

PROMPT = np.array([5, 6, 7], np.int32).tobytes()
PARAMS = SamplingParams(max_new_tokens=3, stop=("x",), stop_token_ids=(3,), logit_bias={1: 2.0})
TO_CORE: list[ToCore] = [
    Hello(PROTOCOL_VERSION, "token"),
    GenerateRequest("r", PROMPT, PARAMS, 0, "salt"),
    AbortRequest("r", True),
    FlushCache(1),
    GetStats(2),
    AddCorpus(3, "n", (PROMPT, PROMPT), "t"),
    RemoveCorpus(4, "n"),
    ListCorpora(5),
    Shutdown(1.0),
]
TO_GATEWAY: list[sdk.ToGateway] = [
    sdk.ClientHello(sdk.SDK_VERSION, SDK_TOKEN),
    sdk.ClientGenerate("r", "text", b"", PARAMS),
    sdk.ClientGenerate("r", None, PROMPT, PARAMS),
    sdk.ClientAbort("r"),
    sdk.ClientStats(1),
    sdk.ClientInfo(2),
    sdk.ClientFlush(3),
    sdk.ClientPing(),
    sdk.ClientBye(),
]
CORE_FRAMES = [encode(message) for message in TO_CORE]
GATEWAY_FRAMES = [sdk.encode(message) for message in TO_GATEWAY]

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9)
)  # fmt: skip
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=5), scalars)


def mutate(frame: bytes, random: Random) -> bytes:
    """A valid frame with a byte or two changed, cut short, extended, or a piece doubled."""
    at = random.randrange(len(frame))
    match random.randrange(6):
        case 0:
            return frame[:at]
        case 1:
            return frame[:at] + random.randbytes(random.randint(1, 6)) + frame[at:]
        case 2:
            return frame + frame[at:]
        case 3:
            return frame[:at] + random.randbytes(4) + frame[at + 4 :]
        case _:
            return frame[:at] + random.randbytes(1) + frame[at + 1 :]


@st.composite
def retyped(draw: st.DrawFn, frames: list[bytes]) -> bytes:
    """A valid frame with one field replaced by any value, or with one more."""
    fields = msgspec.msgpack.decode(draw(st.sampled_from(frames)))
    at = draw(st.integers(1, len(fields)))
    fields[at : at + 1] = [draw(values)]
    return pack(fields)


@st.composite
def bursts(draw: st.DrawFn, frames: list[bytes]) -> list[bytes]:
    """Mutated frames, some with a field of the wrong type, and one of random bytes."""
    random = Random(draw(st.integers(0, 2**32)))
    burst = [mutate(random.choice(frames), random) for _ in range(50)]
    return [*burst, draw(retyped(frames)), draw(retyped(frames)), draw(st.binary(max_size=60))]


@pytest.mark.parametrize("side", ["core", "gateway"])
def test_decoders_answer_everything_with_a_message_or_a_refusal(side: str) -> None:
    decode: Callable[[bytes], object]
    decode, frames, kinds = (
        (decode_to_core, CORE_FRAMES, tuple(type(m) for m in TO_CORE))
        if side == "core"
        else (sdk.decode_to_gateway, GATEWAY_FRAMES, tuple(type(m) for m in TO_GATEWAY))
    )
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(bursts(frames))
    def fuzz(burst: list[bytes]) -> None:
        for frame in burst:
            answer = decode(frame)
            if isinstance(answer, Refused):
                seen["refused"] += 1
                assert (answer.field, answer.status) == ("frame", 400)
                assert "not a message of" in answer.reason
            else:
                seen["read"] += 1
                assert isinstance(answer, kinds)
                assert type(decode(pack(answer))) is type(answer)

    fuzz()
    assert seen["refused"] > 1000
    assert seen["read"] > 50


@pytest.fixture(scope="module")
def core() -> Iterator[CoreProcess]:
    with running_core(
        context_length=64, speculative_algorithm="NGRAM", speculative_ngram_capacity=1000
    ) as core:
        yield core


def drain(peer: RawPeer, done: Callable[[bytes], bool]) -> int:
    """Read until the answer to the last message; returns how many messages came."""
    count = 1
    while not done(peer.receive()):
        count += 1
    return count


def harmless(frame: bytes) -> bytes:
    """Fuzzed shutdowns would end the core by design."""
    return pack(["get_stats", 1]) if isinstance(decode_to_core(frame), Shutdown) else frame


def test_a_live_core_survives(core: CoreProcess) -> None:
    seen: Counter[str] = Counter()
    with raw_peer(core.endpoint, "hello", PROTOCOL_VERSION, core.token) as peer:

        @settings(max_examples=10)
        @given(bursts(CORE_FRAMES[1:]))
        def fuzz(frames: list[bytes]) -> None:
            for frame in frames:
                peer.send([harmless(frame)])
                seen["sent"] += 1
            peer.send([pack(["abort", "", True])])
            peer.send([pack(["get_stats", 12345])])
            seen["answers"] += drain(peer, lambda frame: stats_call(frame) == 12345)

        def stats_call(frame: bytes) -> int | None:
            message = msgspec.msgpack.decode(frame)
            return message[1] if message[0] == "stats" else None

        fuzz()
        assert seen["sent"] >= 300
        assert seen["answers"] > seen["sent"] / 2
        peer.send([pack(["generate", "last", PROMPT, {"max_new_tokens": 2, "ignore_eos": True}])])
        tokens = 0
        finished = False
        while not finished:
            message = peer.from_core()
            if isinstance(message, Outputs):
                mine = [output for output in message.outputs if output.rid == "last"]
                tokens += sum(len(output.tokens) // 4 for output in mine)
                finished = any(output.finish is not None for output in mine)
        assert tokens == 2
        peer.send([pack(["get_stats", 7])])
        while not isinstance(stats := peer.from_core(), CoreStats) or stats.call != 7:
            pass
        assert stats.running == stats.waiting == 0
        assert stats.free_pages + stats.cached_pages == stats.total_pages
    assert core.exit_status is None


def test_a_live_gateway_survives(core: CoreProcess) -> None:
    gateway = RunningGateway(core)
    sent = 0
    try:
        with raw_peer(gateway.endpoint, "client_hello", sdk.SDK_VERSION, SDK_TOKEN) as peer:

            @settings(max_examples=6)
            @given(bursts(GATEWAY_FRAMES))
            def fuzz(frames: list[bytes]) -> None:
                nonlocal sent
                for frame in frames:
                    peer.send([frame])
                    sent += 1
                peer.send([pack(["client_hello", sdk.SDK_VERSION, SDK_TOKEN])])  # after a bye
                peer.send([pack(["client_abort", "", True])])
                peer.send([pack(["client_stats", 54321])])
                drain(
                    peer, lambda frame: msgspec.msgpack.decode(frame)[:2] == ["stats_reply", 54321]
                )

            fuzz()
            assert sent >= 200
            request = ["client_generate", "last", "def", b"", {"max_new_tokens": 2}, False]
            peer.send([pack(request)])
            while True:
                answer = peer.from_gateway()
                if isinstance(answer, sdk.TextChunk) and answer.rid == "last":
                    break
            assert answer.finish is not None
            assert answer.finish.kind in ("length", "stop")
    finally:
        gateway.close()
    assert core.exit_status is None
