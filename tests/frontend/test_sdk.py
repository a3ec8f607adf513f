"""The ZeroMQ client SDK against a gateway over a scripted core."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.auth
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import AsyncClient, Client, SamplingParams
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.refusal import Refused, RefusedError
from outrider.frontend.client_connection import CurveKeys
from outrider.frontend.client_messages import (
    MAX_SDK_FRAME_BYTES,
    ClientAbort,
    ClientGenerate,
    ClientHello,
    ClientRefused,
    ClientStats,
    FromGateway,
    Pong,
    StatsReply,
    Welcome,
    decode_from_gateway,
    decode_to_gateway,
    encode,
)
from outrider.frontend.errors import ServerGone
from outrider.frontend.server_config import ServerConfig
from outrider.frontend.tokenizer import Tokenizer

from .fake_core_process import expected_tokens
from .sdk_server import SdkServer, sdk_server

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("pycoder"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    with sdk_server(tmp_path_factory.mktemp("sdk")) as running:
        yield running


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_generate_and_stream_give_the_same_tokens(server: SdkServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = tuple(expected_tokens(ids, 31))
    with Client(server.endpoint) as client:
        whole = client.generate(PROMPT, SamplingParams(max_new_tokens=31))
        by_ids = client.generate(ids, max_new_tokens=31)
        chunks = list(client.stream(PROMPT, max_new_tokens=31))
    assert whole.token_ids == by_ids.token_ids == expected
    assert tuple(t for c in chunks for t in c.token_ids) == expected
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason == "length"
    assert whole.prompt_tokens == len(ids)
    assert whole.meta_info["spec_accept_length"] == 2.0


def test_several_samples(server: SdkServer) -> None:
    with Client(server.endpoint) as client:
        result = client.generate(PROMPT, max_new_tokens=4, n=3, rid="three")
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert {o.meta_info["id"] for o in result.outputs} == {"three"}
    assert result.completion_tokens == 12


def test_stats_info_and_flush(server: SdkServer) -> None:
    with Client(server.endpoint) as client:
        before = client.stats().finished
        client.generate(PROMPT, max_new_tokens=1)
        assert client.stats().finished == before + 1
        assert client.server_info()["version"] == "test"
        client.flush_cache()


def test_async_requests_run_together(server: SdkServer) -> None:
    async def many() -> list[int]:
        async with AsyncClient(server.endpoint) as client:
            results = await asyncio.gather(
                *(client.generate([i + 5], max_new_tokens=50) for i in range(20))
            )
        return [r.token_ids[0] for r in results]

    assert asyncio.run(many()) == [i + 6 for i in range(20)]


def test_abort_ends_with_what_there_is(server: SdkServer) -> None:
    with Client(server.endpoint) as client:
        stream = client.stream(PROMPT, rid="long", max_new_tokens=4000)
        got = [next(stream)]
        client.abort("long")
        got += stream
        assert got[-1].finish_reason == "abort"
        assert sum(len(c.token_ids) for c in got) < 4000
        client.abort("unknown")  # nothing to end


def test_leaving_a_stream_early_aborts_it(server: SdkServer) -> None:
    with Client(server.endpoint) as client:
        for _ in client.stream(PROMPT, max_new_tokens=4000):
            break
        eventually(lambda: not server.core.running)


def test_a_timeout_aborts_the_request(server: SdkServer) -> None:
    with Client(server.endpoint) as client:
        with pytest.raises(TimeoutError):
            client.generate(PROMPT, max_new_tokens=4000, timeout=0.05)
        eventually(lambda: not server.core.running)
        assert client.generate(PROMPT, max_new_tokens=2).completion_tokens == 2


def test_refusals_name_the_field(server: SdkServer) -> None:
    with Client(server.endpoint) as client:
        for sampling, field in (
            ({"temperature": -1.0}, "temperature"),
            ({"max_new_tokens": 5000}, "max_new_tokens"),
            ({"no_such": 1}, "no_such"),
            ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ):
            with pytest.raises(RefusedError) as caught:
                client.generate(PROMPT, **sampling)
            assert caught.value.refused.field == field
        with pytest.raises(RefusedError, match="empty"):
            client.generate("")
        with pytest.raises(RefusedError, match="list of token ids"):
            client.generate(["x"])  # type: ignore[list-item]
        stream = client.stream(PROMPT, rid="same", max_new_tokens=4000)
        next(stream)
        with pytest.raises(RefusedError, match="in use"):
            client.generate(PROMPT, rid="same")
        client.abort()
        assert client.generate(PROMPT, max_new_tokens=1).completion_tokens == 1


def test_two_clients_may_use_one_request_id(server: SdkServer) -> None:
    with Client(server.endpoint) as one, Client(server.endpoint) as two:
        first = one.stream(PROMPT, rid="r", max_new_tokens=3000)
        next(first)
        assert two.generate(PROMPT, rid="r", max_new_tokens=3).meta_info["id"] == "r"
        two.abort("r")
        two.abort()
        assert next(first).finish_reason is None
        one.abort()
        assert list(first)[-1].finish_reason == "abort"


def test_no_server_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ServerGone, match="no answer from"):
        Client(f"ipc://{tmp_path}/none", connect_timeout=0.2).connect()
    with pytest.raises(RefusedError, match="cannot connect"):
        Client("nonsense").connect()


def test_a_gateway_that_ends_fails_open_requests_at_once(tmp_path: Path) -> None:
    with sdk_server(tmp_path) as server, Client(server.endpoint) as client:
        stream = client.stream(PROMPT, max_new_tokens=4000)
        next(stream)
        server.close_gateway()
        started = time.monotonic()
        with pytest.raises(ServerGone, match="gone"):
            list(stream)
        assert time.monotonic() - started < 1.0


def test_a_dead_core_fails_requests_and_not_the_gateway(tmp_path: Path) -> None:
    with sdk_server(tmp_path) as server, Client(server.endpoint) as client:
        stream = client.stream(PROMPT, max_new_tokens=4000)
        next(stream)
        server.core.stopping.set()
        started = time.monotonic()
        with pytest.raises(Exception, match="core"):
            list(stream)
        assert time.monotonic() - started < 1.0
        with pytest.raises(RefusedError, match="core"):
            client.generate(PROMPT)


def test_draining_refuses_new_requests_only(tmp_path: Path) -> None:
    with sdk_server(tmp_path) as server, Client(server.endpoint) as client:
        stream = client.stream(PROMPT, max_new_tokens=100)
        next(stream)
        server.drain()
        with pytest.raises(RefusedError, match="shutting down"):
            client.generate(PROMPT)
        assert list(stream)[-1].finish_reason == "length"


# --- frames that no client of ours would send ----------------------------------------------------


class RawClient:
    """A bare DEALER."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.connect(endpoint)

    def ask(self, *frames: bytes) -> FromGateway:
        self.socket.send_multipart(frames)
        return decode_from_gateway(self.socket.recv())

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def raw(server: SdkServer) -> Iterator[RawClient]:
    client = RawClient(server.endpoint)
    yield client
    client.close()


HELLO = encode(ClientHello(1))


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"\xc1",),
        (b"not msgpack",),
        (b"\x80",),
        (msgspec.msgpack.encode(["no_such_tag", 1]),),
        (msgspec.msgpack.encode(["client_hello"]),),
        (msgspec.msgpack.encode(["client_hello", "one"]),),
        (msgspec.msgpack.encode(["client_generate", 1, 2, 3]),),
        (b"\x91" * 5000,),
        (HELLO, HELLO),
        (b"a", b"b", b"c"),
        (b"x" * (MAX_SDK_FRAME_BYTES + 1),),
        (encode(ClientHello(99)),),
        (encode(ClientStats(1)),),  # before the greeting
        (encode(ClientAbort("x")),),
    ],
)
def test_garbage_is_refused_and_the_server_lives(
    raw: RawClient, server: SdkServer, frames: tuple[bytes, ...]
) -> None:
    assert isinstance(raw.ask(*frames), ClientRefused)
    assert isinstance(raw.ask(HELLO), Welcome)
    assert isinstance(raw.ask(encode(ClientStats(1))), StatsReply)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ClientGenerate("", "x", b"", SamplingParams()), "rid"),
        (ClientGenerate("r" * 257, "x", b"", SamplingParams()), "rid"),
        (ClientGenerate("r", None, b"123", SamplingParams()), "prompt"),
        (ClientGenerate("r", None, b"", SamplingParams()), "prompt"),
        (ClientGenerate("r", None, b"\xff\xff\xff\xff", SamplingParams()), "prompt"),
        (ClientGenerate("r", "x", b"\0\0\0\0", SamplingParams()), "prompt"),
        (ClientGenerate("r", "x", b"", SamplingParams(n=0)), "n"),
        (ClientGenerate("r", "x", b"", SamplingParams(), priority=2**40), "priority"),
    ],
)
def test_bad_requests_are_refused_by_field(
    raw: RawClient, request_: ClientGenerate, field: str
) -> None:
    raw.ask(HELLO)
    answer = raw.ask(encode(request_))
    assert isinstance(answer, ClientRefused)
    assert (answer.refused.field, answer.rid) == (field, request_.rid)


@given(st.binary(max_size=200))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_decoding_never_raises(frame: bytes) -> None:
    decoded = decode_to_gateway(frame)
    assert isinstance(decoded, Refused) or encode(decoded)


@given(st.integers(0, 2**32), st.integers(0, 60), st.binary(min_size=1, max_size=4))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_damaged_requests_never_raise(seed: int, at: int, damage: bytes) -> None:
    frame = bytearray(encode(ClientGenerate("rid", "text", b"", SamplingParams(seed=seed))))
    at %= len(frame)
    frame[at : at + len(damage)] = damage
    decoded = decode_to_gateway(bytes(frame))
    assert isinstance(decoded, Refused) or encode(decoded)


def test_a_silent_client_loses_its_requests(tmp_path: Path) -> None:
    with sdk_server(tmp_path, silence_s=0.3, step_ms=5) as server:
        client = RawClient(server.endpoint)
        client.ask(HELLO)
        client.ask(encode(ClientGenerate("r", "x", b"", SamplingParams(max_new_tokens=4000))))
        assert server.core.running
        eventually(lambda: not server.core.running, 2.0)
        assert server.core.aborts == 1
        client.close()


def test_a_client_that_vanishes_loses_its_requests(tmp_path: Path) -> None:
    with sdk_server(tmp_path, step_ms=5) as server:
        client = RawClient(server.endpoint)
        client.ask(HELLO)
        client.ask(encode(ClientGenerate("r", "x", b"", SamplingParams(max_new_tokens=4000))))
        client.close()
        eventually(lambda: not server.core.running, 2.0)


# --- tokens and keys -----------------------------------------------------------------------------


def test_token_is_asked_for(tmp_path: Path) -> None:
    config = ServerConfig(zmq_endpoint="tcp://127.0.0.1:*", zmq_token="right")
    with sdk_server(tmp_path, config) as server:
        with Client(server.endpoint, token="right") as client:
            assert client.generate(PROMPT, max_new_tokens=2).completion_tokens == 2
        for wrong in ("", "wrong", "right "):
            with pytest.raises(RefusedError, match="token"):
                Client(server.endpoint, token=wrong).connect()


def test_curve_keys_are_asked_for(tmp_path: Path) -> None:
    names = ("server", "friend", "stranger")
    files = {n: zmq.auth.create_certificates(tmp_path, n) for n in names}
    clients = tmp_path / "clients"
    clients.mkdir()
    (clients / "friend.key").write_bytes(Path(files["friend"][0]).read_bytes())
    config = ServerConfig(
        zmq_endpoint="tcp://127.0.0.1:*",
        zmq_curve_secret_key_file=files["server"][1],
        zmq_curve_clients_dir=str(clients),
    )
    keys = {n: CurveKeys.from_files(files["server"][0], files[n][1]) for n in names}
    with sdk_server(tmp_path, config) as server:
        assert server.gateway.curve_server_key == keys["friend"].server_key
        with Client(server.endpoint, curve=keys["friend"]) as client:
            assert client.generate(PROMPT, max_new_tokens=2).completion_tokens == 2
        with pytest.raises(ServerGone, match=r"keys"):
            Client(server.endpoint, curve=keys["stranger"], connect_timeout=2).connect()
        wrong = keys["friend"]._replace(server_key=keys["stranger"].public_key)
        with pytest.raises(ServerGone, match=r"keys|gone"):
            Client(server.endpoint, curve=wrong, connect_timeout=1).connect()
        with pytest.raises(ServerGone):
            Client(server.endpoint, connect_timeout=1).connect()
        with pytest.raises(RefusedError, match="CURVE"):
            Client(server.endpoint, curve=CurveKeys("x", "y", "z")).connect()
        with Client(server.endpoint, curve=keys["friend"]) as client:
            assert client.generate(PROMPT, max_new_tokens=2).completion_tokens == 2


def test_pong(raw: RawClient) -> None:
    from outrider.frontend.client_messages import ClientPing

    raw.ask(HELLO)
    assert isinstance(raw.ask(encode(ClientPing())), Pong)
