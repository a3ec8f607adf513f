"""Malformed ZeroMQ frames to a real engine core and to the SDK gateway over it.

Each is answered by a refusal that names what was wrong, and both serve the next request.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from outrider.engine_core.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    CallReply,
    CoreError,
    CoreStats,
    Outputs,
    Ready,
)
from outrider.frontend.client_messages import (
    MAX_SDK_FRAME_BYTES,
    SDK_VERSION,
    ClientRefused,
    Pong,
    StatsReply,
    TextChunk,
    Welcome,
)
from outrider.frontend.launch import CoreProcess

from .wire import SDK_TOKEN, RawPeer, RunningGateway, pack, raw_peer, running_core

PROMPT = np.array([5, 6, 7], np.int32).tobytes()
VOCABULARY = 8192
CONTEXT = 512
HUGE = b"\xff\xff\xff\xff"  # a length that no frame has


class Bad(NamedTuple):
    """Frames of one message, the refused field, and words that the reason must hold."""

    what: str
    frames: list[bytes]
    field: str
    words: str
    status: int = 400


def one(what: str, message: object, field: str, words: str, status: int = 400) -> Bad:
    return Bad(what, [pack(message)], field, words, status)


def generate(
    what: str, field: str, words: str, prompt: object = PROMPT, status: int = 400, **params: object
) -> Bad:
    return one(what, ["generate", "bad", prompt, params], field, words, status)


NOT_MESSAGES = [
    Bad("an empty frame", [b""], "frame", "truncated"),
    Bad("random bytes", [bytes(range(7, 250, 3))], "frame", "Expected `array`"),
    Bad("an unused msgpack byte", [b"\xc1"], "frame", "invalid opcode"),
    Bad("JSON", [b'["generate"]'], "frame", "Expected `array`"),
    Bad("a map", [pack({"type": "generate"})], "frame", "Expected `array`, got `object`"),
    Bad("nil", [pack(None)], "frame", "Expected `array`, got `None`"),
    Bad("a number", [pack(17)], "frame", "Expected `array`, got `int`"),
    Bad("an empty array", [pack([])], "frame", "at least length"),
    Bad("a tag that is a number", [pack([5, 1])], "frame", "Expected `str`"),
    Bad("an unknown tag", [pack(["explode", 1])], "frame", "Invalid value 'explode'"),
    Bad("deep nesting", [b"\x91" * 100_000], "frame", "Expected `str`"),
    Bad("an endless array", [b"\xdd" + HUGE], "frame", "truncated"),
    Bad("no frame at all", [b"", b""], "frame", "one frame"),
    Bad("two frames", [pack(["a"]), pack(["b"])], "frame", "one frame"),
    Bad("many frames", [b"x"] * 500, "frame", "500"),
]

TO_CORE = [
    *NOT_MESSAGES,
    Bad("a client's tag", [pack(["client_ping"])], "frame", "Invalid value 'client_ping'"),
    Bad("an answer's tag", [pack(["ready", 1, {}])], "frame", "Invalid value 'ready'"),
    Bad("too few fields", [pack(["generate", "r"])], "frame", "at least length 4"),
    Bad(
        "too many fields",
        [pack(["generate", "r", PROMPT, {}, 0, "", True, True, 9])],
        "frame",
        "at most length 7, got 8",
    ),
    Bad("bytes behind the message", [pack(["get_stats", 1]) + b"\x01"], "frame", "trailing"),
    Bad("a cut message", [pack(["generate", "r", PROMPT, {}])[:-3]], "frame", "truncated"),
    Bad("a cut string", [b"\x92" + pack("get_stats")[:-1]], "frame", "truncated"),
    Bad("endless documents", [b"\x94" + pack("add_corpus") + pack(1) + pack("n") + b"\xdd" + HUGE],
        "frame", "truncated"),
    Bad("broken UTF-8", [b"\x92" + pack("abort") + b"\xa2\xff\xfe"], "frame", "UTF-8"),
    Bad("a deep field", [b"\x92" + pack("get_stats") + b"\x91" * 100_000], "frame", "int"),
    one("an id of 5", ["generate", 5, PROMPT, {}], "frame", "`str`, got `int` - at `$[1]`"),
    one("a prompt of text", ["generate", "bad", "abc", {}], "frame", "`bytes`, got `str`"),
    one("a prompt of numbers", ["generate", "bad", [1, 2], {}], "frame", "`bytes`, got `array`"),
    one("parameters in a list", ["generate", "bad", PROMPT, []], "frame", "`object`, got `array`"),
    one("a salt that is a number", ["generate", "bad", PROMPT, {}, 0, 5], "frame", "$[5]"),
    one("a priority of text", ["generate", "bad", PROMPT, {}, "1"], "frame", "$[4]"),
    one("a switch that is a number", ["generate", "bad", PROMPT, {}, 0, "", 1], "frame", "$[6]"),
    one("a call of text", ["get_stats", "one"], "frame", "`int`, got `str`"),
    one("a drain of text", ["shutdown", "now"], "frame", "`float`, got `str`"),
    one("documents of text", ["add_corpus", 1, "n", ["abc"]], "frame", "`bytes`, got `str`"),
    generate("an unknown parameter", "frame", "unknown field `temprature`", temprature=1.0),
    generate("a parameter of text", "frame", "$[3].temperature", temperature="hot"),
    generate("stops of numbers", "frame", "$[3].stop[0]", stop=[1]),
    generate("a bias for a word", "frame", "$[3]", logit_bias={"a": 1.0}),
    generate("an empty prompt", "prompt", "one or more int32 tokens", b""),
    generate("three bytes of prompt", "prompt", "got 3 B", b"abc"),
    generate("one byte too many", "prompt", "got 13 B", PROMPT + b"\0"),
    generate("a negative token", "prompt", "token -1 at 0 is outside", b"\xff" * 4),
    generate("a token too large", "prompt", "outside the vocabulary of 8192",
             np.array([1, VOCABULARY], np.int32).tobytes()),
    generate("a prompt beyond the context", "prompt", "shorten the prompt",
             bytes(4 * CONTEXT), 413),
    generate("n", "n", "one request for each sequence", n=2),
    generate("negative max_new_tokens", "max_new_tokens", "between 0", max_new_tokens=-1),
    generate("max_new_tokens 2**31", "max_new_tokens", "2147483647", max_new_tokens=2**31),
    generate("min above max", "min_new_tokens", "between 0 and",
             min_new_tokens=2, max_new_tokens=1),
    generate("temperature NaN", "temperature", "0 and 1e+06", temperature=float("nan")),
    generate("temperature 1e300", "temperature", "0 and 1e+06", temperature=1e300),
    generate("temperature below 0", "temperature", "between 0", temperature=-1.0),
    generate("top_p 0", "top_p", "(0, 1]", top_p=0.0),
    generate("top_k 0", "top_k", "-1 (all) or between 1", top_k=0),
    generate("top_k 2**31", "top_k", "2147483647", top_k=2**31),
    generate("min_p 2", "min_p", "[0, 1]", min_p=2.0),
    generate("a penalty NaN", "frequency_penalty", "[-2, 2]", frequency_penalty=float("nan")),
    generate("repetition_penalty 0", "repetition_penalty", "[0.01, 2]", repetition_penalty=0.0),
    generate("a tiny penalty", "repetition_penalty", "[0.01, 2]", repetition_penalty=1e-40),
    generate("seed 2**63", "seed", "64 bits", seed=2**63),
    generate("logprobs 129", "logprobs", "between 0 and 128", logprobs=129),
    generate("an empty stop", "stop", "must not be empty", stop=[""]),
    generate("33 stops", "stop", "at most 32", stop=["x"] * 33),
    generate("a stop id outside", "stop_token_ids", "outside the vocabulary",
             stop_token_ids=[VOCABULARY]),
    generate("a bias outside", "logit_bias", "outside the vocabulary", logit_bias={-1: 1.0}),
    generate("a bias too large", "logit_bias", "[-100, 100]", logit_bias={1: 1e9}),
    generate("a banned token outside", "bad_words_ids", "outside the vocabulary",
             bad_words_ids=[[1, VOCABULARY]]),
    generate("an empty ban", "bad_words_ids", "between 1 and 32 tokens", bad_words_ids=[[]]),
    generate("a long ban", "bad_words_ids", "between 1 and 32 tokens", bad_words_ids=[[1] * 33]),
    generate("many bans", "bad_words_ids", "at most 1024", bad_words_ids=[[1]] * 1025),
    generate("words", "bad_words", "send their tokens", bad_words=["x"]),
    generate("no token allowed", "allowed_token_ids", "at least one", allowed_token_ids=[]),
    generate("an allowed one outside", "allowed_token_ids", "outside", allowed_token_ids=[-1]),
    generate("nothing to choose", "allowed_token_ids", "without any token",
             allowed_token_ids=[0], min_new_tokens=1),
    one("an empty id", ["generate", "", PROMPT, {}], "rid", "must not be empty"),
    one("a priority without the flag", ["generate", "bad", PROMPT, {}, 3], "priority",
        "--enable-priority-scheduling"),
]  # fmt: skip

CALLS = [
    (["add_corpus", 7, "", [PROMPT]], "corpus", "no name"),
    (["add_corpus", 7, "n", []], "corpus", "empty"),
    (["add_corpus", 7, "n", [b""]], "corpus", "empty"),
    (["add_corpus", 7, "n", [b"abc"]], "corpus", "document 0 is not int32"),
    (["add_corpus", 7, "n", [PROMPT, b"\xff" * 4]], "corpus", "document 1 has a token outside"),
    (["add_corpus", 7, "n", [PROMPT], ""], "corpus", "tenant is empty"),
]

HELLOS = [
    ("an old version", ["hello", PROTOCOL_VERSION - 1, "{token}"], "version", "protocol", 400),
    ("a new version", ["hello", 99, "{token}"], "version", "not 99", 400),
    ("no token", ["hello", PROTOCOL_VERSION], "token", "not this core's", 401),
    ("a wrong token", ["hello", PROTOCOL_VERSION, "guess"], "token", "not this core's", 401),
    ("a token beyond ASCII", ["hello", PROTOCOL_VERSION, "schlüssel"], "token", "not this", 401),
    ("a request first", ["generate", "r", PROMPT, {}], "hello", "first message", 401),
    ("a call first", ["get_stats", 1], "hello", "first message", 401),
    ("a shutdown first", ["shutdown", 0.0], "hello", "first message", 401),
]  # fmt: skip


@pytest.fixture(scope="module")
def core() -> Iterator[CoreProcess]:
    with running_core(
        speculative_algorithm="NGRAM",
        speculative_ngram_external_sam_budget=4,
        speculative_ngram_capacity=100_000,
    ) as core:
        yield core


@pytest.fixture(scope="module")
def peer(core: CoreProcess) -> Iterator[RawPeer]:
    with raw_peer(core.endpoint, "hello", PROTOCOL_VERSION, core.token) as peer:
        yield peer


@pytest.fixture(scope="module")
def gateway(core: CoreProcess) -> Iterator[RunningGateway]:
    running = RunningGateway(core)
    yield running
    running.close()


def finish_of(peer: RawPeer, rid: str) -> tuple[int, str]:
    """Tokens and finish kind of a request, from its outputs."""
    count = 0
    while True:
        message = peer.from_core()
        assert isinstance(message, Outputs), message
        for output in message.outputs:
            assert output.rid == rid
            count += len(output.tokens) // 4
            if output.finish is not None:
                return count, output.finish.kind


def assert_core_serves(peer: RawPeer) -> None:
    peer.send([pack(["generate", "good", PROMPT, {"max_new_tokens": 4, "ignore_eos": True}])])
    assert finish_of(peer, "good") == (4, "length")


@pytest.mark.parametrize("bad", TO_CORE, ids=lambda bad: bad.what)
def test_the_core_refuses_a_frame(peer: RawPeer, bad: Bad) -> None:
    peer.send(bad.frames)
    answer = peer.from_core()
    assert isinstance(answer, CoreError)
    assert answer.refused.field == bad.field
    assert bad.words in answer.refused.reason
    assert answer.refused.status == bad.status
    known = bad.field not in ("frame", "rid")
    assert answer.rid == ("bad" if known else None if bad.field == "frame" else "")
    peer.send([pack(["get_stats", 3])])
    stats = peer.from_core()
    assert isinstance(stats, CoreStats)
    assert (stats.call, stats.running, stats.waiting) == (3, 0, 0)


@pytest.mark.parametrize(("message", "field", "words"), CALLS)
def test_the_core_refuses_a_corpus(
    peer: RawPeer, message: list[object], field: str, words: str
) -> None:
    peer.send([pack(message)])
    answer = peer.from_core()
    assert isinstance(answer, CallReply)
    assert answer.call == 7
    assert answer.refused is not None
    assert answer.refused.field == field
    assert words in answer.refused.reason


@pytest.mark.parametrize("case", HELLOS, ids=lambda case: case[0])
def test_the_core_greets_only_who_knows_it(
    core: CoreProcess, case: tuple[str, list[object], str, str, int]
) -> None:
    _, message, field, words, status = case
    message = [core.token if part == "{token}" else part for part in message]
    with raw_peer(core.endpoint) as stranger:
        stranger.send([pack(message)])
        answer = stranger.from_core()
        assert isinstance(answer, CoreError)
        assert (answer.refused.field, answer.refused.status) == (field, status)
        assert words in answer.refused.reason
        stranger.send([pack(["hello", PROTOCOL_VERSION, core.token])])
        assert isinstance(stranger.from_core(), Ready)


def test_a_frame_beyond_the_limit_is_answered(core: CoreProcess, peer: RawPeer) -> None:
    peer.send([bytes(MAX_FRAME_BYTES + 1)])
    answer = peer.from_core()
    assert isinstance(answer, CoreError)
    assert answer.refused.status == 413
    assert str(MAX_FRAME_BYTES) in answer.refused.reason


def test_an_id_in_flight_is_refused_and_the_first_goes_on(peer: RawPeer) -> None:
    request = ["generate", "twice", PROMPT, {"max_new_tokens": 400, "ignore_eos": True}]
    peer.send([pack(request)])
    peer.send([pack(request)])
    while not isinstance(answer := peer.from_core(), CoreError):
        pass
    assert (answer.refused.field, answer.rid) == ("rid", "twice")
    assert "in flight already" in answer.refused.reason
    peer.send([pack(["abort", "twic"])])  # a prefix is another id
    peer.send([pack(["abort", "twice"])])
    assert finish_of(peer, "twice")[1] == "abort"


def test_one_clients_requests_are_not_anothers_to_end(core: CoreProcess, peer: RawPeer) -> None:
    peer.send([pack(["generate", "mine", PROMPT, {"max_new_tokens": 60, "ignore_eos": True}])])
    with raw_peer(core.endpoint, "hello", PROTOCOL_VERSION, core.token) as other:
        other.send([pack(["abort", "mine"])])
        other.send([pack(["abort", "", True])])
        other.send([pack(["get_stats", 1])])
        assert isinstance(other.from_core(), CoreStats)
    assert finish_of(peer, "mine") == (60, "length")


LARGE = 2**31 - 1
EXTREMES: list[dict[str, object]] = [
    {"max_new_tokens": LARGE, "min_new_tokens": LARGE, "stop_token_ids": [1]},
    {"top_k": LARGE},
    {"temperature": 1e6},
    {"temperature": 1e-5, "top_p": 1e-300, "min_p": 1e-300},
    {"temperature": 1e-300},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1, "top_p": 0.5},
    {"stop": ["x" * 100_000]},
    {"stop_token_ids": list(range(8192)) * 3},
    {"logit_bias": dict.fromkeys(range(8192), -100.0)},
    {"repetition_penalty": 0.01, "frequency_penalty": -2.0, "presence_penalty": -2.0},
    {"logprobs": 128},
]


@pytest.mark.parametrize("params", EXTREMES, ids=lambda p: "-".join(p))
def test_extreme_values_that_are_allowed_are_served(
    peer: RawPeer, params: dict[str, object]
) -> None:
    prompt = np.full(CONTEXT - 12, 5, np.int32).tobytes()
    peer.send([pack(["generate", "extreme", prompt, {"max_new_tokens": 3, **params}])])
    tokens, kind = finish_of(peer, "extreme")
    assert kind in ("stop", "length")
    assert tokens == (12 if params.get("max_new_tokens") == LARGE else tokens)
    assert 1 <= tokens <= 12


def test_a_shutdown_with_nonsense_seconds_is_a_shutdown() -> None:
    with (
        running_core() as core,
        raw_peer(core.endpoint, "hello", PROTOCOL_VERSION, core.token) as peer,
    ):
        peer.send([pack(["add_corpus", 1, "n", [PROMPT]])])
        answer = peer.from_core()
        assert isinstance(answer, CallReply)
        assert "NGRAM" in str(answer.refused)
        peer.send([pack(["shutdown", float("nan")])])
        assert core.wait(20) == 0


# --- the SDK gateway ------------------------------------------------------------------------------


def sdk(what: str, field: str, words: str, *fields: object, status: int = 400) -> Bad:
    return one(what, ["client_generate", "bad", *fields], field, words, status)


TO_GATEWAY = [
    *NOT_MESSAGES,
    Bad("a core's tag", [pack(["generate", "r", PROMPT, {}])], "frame", "Invalid value 'generate'"),
    Bad("too few fields", [pack(["client_generate", "r"])], "frame", "at least length"),
    Bad("too many fields", [pack(["client_ping", 1])], "frame", "at most length 0, got 1"),
    Bad("bytes behind the message", [pack(["client_ping"]) + b"\0"], "frame", "trailing"),
    Bad("a cut message", [pack(["client_stats", 1000])[:-1]], "frame", "truncated"),
    one("a call of text", ["client_stats", "x"], "frame", "`int`, got `str`"),
    sdk("text of bytes", "frame", "$[2]", b"abc", b"", {}),
    sdk("an unknown parameter", "frame", "unknown field `temprature`", "a", b"", {"temprature": 1}),
    sdk("text and tokens", "prompt", "not both", "a", PROMPT, {}),
    sdk("neither text nor tokens", "prompt", "empty", None, b"", {}),
    sdk("empty text", "prompt", "empty", "", b"", {}),
    sdk("three bytes of tokens", "prompt", "multiple of 4", None, b"abc", {}),
    sdk("a token outside", "prompt", "outside the vocabulary", None, b"\xff" * 4, {}),
    sdk("a long prompt", "prompt", "shorten it", None, bytes(4 * CONTEXT), {}),
    sdk("too many new tokens", "max_new_tokens", "ask for at most", "a", b"",
        {"max_new_tokens": CONTEXT}),
    sdk("n 0", "n", "between 1 and 128", "a", b"", {"n": 0}),
    sdk("temperature -1", "temperature", "between 0", "a", b"", {"temperature": -1.0}),
    sdk("a priority too large", "priority", "32 bits", "a", b"", {}, True, 2**40),
    sdk("a priority without the flag", "priority", "--enable-priority", "a", b"", {}, True, 1),
    one("an empty id", ["client_generate", "", "a", b"", {}], "rid", "1 to 256"),
    one("a long id", ["client_generate", "x" * 257, "a", b"", {}], "rid", "1 to 256"),
]  # fmt: skip


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Iterator[RawPeer]:
    with raw_peer(gateway.endpoint, "client_hello", SDK_VERSION, SDK_TOKEN) as peer:
        yield peer


@pytest.mark.parametrize("bad", TO_GATEWAY, ids=lambda bad: bad.what)
def test_the_gateway_refuses_a_frame(client: RawPeer, bad: Bad) -> None:
    client.send(bad.frames)
    answer = client.from_gateway()
    if isinstance(answer, TextChunk):  # what the core refuses ends the request with the reason
        assert answer.finish is not None
        assert (answer.finish.kind, answer.finish.status) == ("abort", bad.status)
        assert answer.finish.message is not None
        assert answer.finish.message.startswith(bad.field)
        assert bad.words in answer.finish.message
    else:
        assert isinstance(answer, ClientRefused)
        assert answer.refused.field == bad.field
        assert bad.words in answer.refused.reason
        assert answer.refused.status == bad.status
    client.send([pack(["client_ping"])])
    assert isinstance(client.from_gateway(), Pong)


def test_the_gateway_greets_only_who_knows_it(gateway: RunningGateway) -> None:
    for message, field, status in (
        (["client_hello", SDK_VERSION + 1, SDK_TOKEN], "version", 400),
        (["client_hello", SDK_VERSION], "token", 401),
        (["client_hello", SDK_VERSION, SDK_TOKEN + "x"], "token", 401),
        (["client_generate", "r", "a", b"", {}], "hello", 401),
        (["client_stats", 1], "hello", 401),
        (["client_bye"], "hello", 401),
    ):
        with raw_peer(gateway.endpoint) as stranger:
            stranger.send([pack(message)])
            answer = stranger.from_gateway()
            assert isinstance(answer, ClientRefused)
            assert (answer.refused.field, answer.refused.status) == (field, status)
            stranger.send([pack(["client_hello", SDK_VERSION, SDK_TOKEN])])
            assert isinstance(stranger.from_gateway(), Welcome)


def test_the_gateway_answers_a_frame_beyond_the_limit(client: RawPeer) -> None:
    client.send([bytes(MAX_SDK_FRAME_BYTES + 1)])
    answer = client.from_gateway()
    assert isinstance(answer, ClientRefused)
    assert answer.refused.status == 413


def test_the_gateway_refuses_an_id_in_flight(client: RawPeer) -> None:
    request = ["client_generate", "same", "a", b"", {"max_new_tokens": 400, "ignore_eos": True}]
    client.send([pack(request)])
    client.send([pack(request)])
    refused = 0
    while True:
        answer = client.from_gateway()
        if isinstance(answer, ClientRefused):
            assert (answer.refused.field, answer.rid) == ("rid", "same")
            refused += 1
            client.send([pack(["client_abort", "other"])])
            client.send([pack(["client_abort", "same"])])
        elif isinstance(answer, TextChunk) and answer.finish is not None:
            assert answer.finish.kind == "abort"
            break
    assert refused == 1


def test_an_abort_that_comes_with_its_request_has_an_end(client: RawPeer) -> None:
    """Both are read at once where the gateway was busy, before anything of the request began."""
    for index in range(20):
        rid = f"at-once-{index}"
        client.send([pack(["client_generate", rid, "a", b"", {"max_new_tokens": 400, "n": 2}])])
        client.send([pack(["client_abort", rid])])
        ended: set[int] = set()
        while ended != {0, 1}:
            answer = client.from_gateway()
            assert isinstance(answer, TextChunk)
            assert answer.rid == rid
            if answer.finish is not None:
                assert answer.finish.kind == "abort"
                assert answer.index not in ended
                ended.add(answer.index)


def test_both_still_serve(core: CoreProcess, peer: RawPeer, client: RawPeer) -> None:
    """Last in this file: after everything above, requests are answered and nothing is left."""
    assert core.exit_status is None
    assert_core_serves(peer)
    client.send([pack(["client_generate", "g", "def f(", b"", {"max_new_tokens": 5}, False])])
    chunk = client.from_gateway()
    assert isinstance(chunk, TextChunk)
    assert chunk.finish is not None
    client.send([pack(["client_stats", 9])])
    reply = client.from_gateway()
    assert isinstance(reply, StatsReply)
    stats = reply.stats
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages
