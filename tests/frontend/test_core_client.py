"""The connection to a core: greeting, merged outputs, numbered calls, death."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from outrider.engine_core.messages import GenerateRequest, RequestOutput
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.core_client import CoreClient, Mailbox, connect_core

from .fake_core import INFO, TOKEN, FakeCore


@asynccontextmanager
async def connected(
    folder: Path, alive: Callable[[], bool] | None = None
) -> AsyncIterator[tuple[FakeCore, CoreClient]]:
    core = FakeCore(folder)
    client, info = await connect_core(core.endpoint, TOKEN, alive=alive, timeout_s=10)
    assert info == INFO
    try:
        yield core, client
    finally:
        await client.close()
        await core.close()


def request(rid: str, tokens: int = 100) -> GenerateRequest:
    prompt = array("i", [5, 6]).tobytes()
    return GenerateRequest(rid, prompt, SamplingParams(max_new_tokens=tokens))


def run(work: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 20)

    asyncio.run(bounded())


async def finish_of(mailbox: Mailbox) -> RequestOutput:
    while True:
        for output in await mailbox.take():
            if output.finish is not None:
                return output


def test_wrong_token_is_refused(short_folder: Path) -> None:
    async def work() -> None:
        core = FakeCore(short_folder)
        with pytest.raises(RefusedError, match="token: is wrong"):
            await connect_core(core.endpoint, "guess", timeout_s=5)
        await core.close()

    run(work())


def test_silence_is_named(short_folder: Path) -> None:
    async def work() -> None:
        with pytest.raises(RefusedError, match="no core answered"):
            await connect_core(f"ipc://{short_folder}/nobody", TOKEN, timeout_s=0.3)

    run(work())


def test_mailbox_merges_what_a_slow_reader_missed() -> None:
    async def work() -> None:
        mailbox = Mailbox()
        for token in range(1000):
            mailbox.put(RequestOutput("a", array("i", [token]).tobytes(), ()))
        mailbox.put(RequestOutput("b", b"", ()))
        outputs = await mailbox.take()
        assert [output.rid for output in outputs] == ["a", "b"]
        assert outputs[0].tokens == array("i", range(1000)).tobytes()

    run(work())


def test_calls_are_matched_by_number(short_folder: Path) -> None:
    async def work() -> None:
        async with connected(short_folder) as (_, client):
            stats, listed, removed = await asyncio.gather(
                client.stats(), client.list_corpora(), client.remove_corpus("x")
            )
            assert stats.spec_drafts == 10
            assert listed.counts == {}
            assert removed.message == "removed"

    run(work())


@pytest.mark.parametrize("how", ["socket", "liveness", "call"])
def test_a_dead_core_fails_everything_within_a_second(short_folder: Path, how: str) -> None:
    async def work() -> None:
        living = True
        async with connected(short_folder, lambda: living) as (core, client):
            core.slow = 1.0
            mailbox = Mailbox()
            client.submit([request("a"), request("b")], mailbox)
            started = time.monotonic()
            if how == "socket":
                await core.close()
            elif how == "liveness":
                living = False
            else:
                client.fail_all("the launcher saw it die")
            outputs = [await finish_of(mailbox)]
            assert time.monotonic() - started < 1.0
            assert outputs[0].finish is not None
            assert outputs[0].finish.status == 503
            assert client.dead.is_set()
            assert client.open_requests == 0
            with pytest.raises(RefusedError):
                client.submit([request("c")], mailbox)
            with pytest.raises(RefusedError):
                await client.stats()

    run(work())


def test_a_call_in_flight_fails_with_the_core(short_folder: Path) -> None:
    async def work() -> None:
        async with connected(short_folder) as (_, client):
            pending = asyncio.create_task(client.stats())
            await asyncio.sleep(0)
            client.fail_all("died")
            with pytest.raises(RefusedError, match="died"):
                await pending

    run(work())


def test_a_message_that_the_core_cannot_read_fails_what_is_open(short_folder: Path) -> None:
    async def work() -> None:
        async with connected(short_folder) as (core, client):
            core.slow = 5.0
            innocent, unread = Mailbox(), Mailbox()
            client.submit([request("a")], innocent)
            wrong: Any = "many"
            client.submit([request("b", wrong)], unread)
            for mailbox in (innocent, unread):
                finish = (await finish_of(mailbox)).finish
                assert finish is not None
                assert finish.status == 500
                assert finish.message is not None
                assert "could not read a message" in finish.message
            assert client.open_requests == 0
            assert not client.dead.is_set()
            core.slow = 0.0
            client.submit([request("c", 2)], innocent)  # the connection lives on
            finish = (await finish_of(innocent)).finish
            assert finish is not None
            assert finish.status == 200
            assert "a" in core.aborted

    run(work())


def test_refused_submissions_send_nothing(short_folder: Path) -> None:
    async def work() -> None:
        async with connected(short_folder) as (core, client):
            core.slow = 0.2
            client.submit([request("a")], Mailbox())
            for ids in (["a"], ["b", "b"], ["c", "a"]):
                with pytest.raises(RefusedError, match="in flight"):
                    client.submit([request(rid) for rid in ids], Mailbox())
            assert client.open_requests == 1
            await asyncio.sleep(0.05)
            assert [r.rid for r in core.requests] == ["a"]

    run(work())


def test_too_many_open_requests_are_refused(short_folder: Path) -> None:
    async def work() -> None:
        async with connected(short_folder) as (core, client):
            core.slow = 0.2
            client._max_open = 3
            client.submit([request("a"), request("b")], Mailbox())
            with pytest.raises(RefusedError, match="3 requests are open") as caught:
                client.submit([request("c"), request("d")], Mailbox())
            assert caught.value.refused.status == 503

    run(work())


def test_aborts(short_folder: Path) -> None:
    async def work() -> None:
        async with connected(short_folder) as (core, client):
            core.slow = 0.2
            mailbox = Mailbox()
            client.submit([request("a"), request("b"), request("c")], mailbox)
            assert client.abort("a")
            assert not client.abort("unknown")
            ended = await finish_of(mailbox)
            assert (ended.rid, ended.finish and ended.finish.kind) == ("a", "abort")
            client.forget("b")
            assert not client.is_open("b")
            with pytest.raises(RefusedError, match="in flight"):  # until the core has ended it
                client.submit([request("b")], Mailbox())
            assert client.abort_all() == 1
            assert (await finish_of(mailbox)).rid == "c"
            client.submit([request("b")], Mailbox())

    run(work())


def test_a_frame_that_cannot_be_sent_leaves_nothing_open(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(frame: bytes) -> None:
        raise zmq.ZMQError(zmq.ETERM)

    async def work() -> None:
        async with connected(short_folder) as (_, client):
            monkeypatch.setattr(client._socket, "send", broken)
            mailbox = Mailbox()
            client.submit([request("a"), request("b")], mailbox)
            ended = [await finish_of(mailbox)]
            assert [o.finish.status for o in ended if o.finish is not None] == [503]
            assert client.open_requests == 0
            assert client.dead.is_set()

    run(work())


def test_an_unreadable_frame_fails_instead_of_hanging(short_folder: Path) -> None:
    async def work() -> None:
        async with connected(short_folder) as (core, client):
            core.slow = 1.0
            mailbox = Mailbox()
            client.submit([request("a")], mailbox)
            await asyncio.sleep(0.1)
            await core.send_garbage()
            ended = await finish_of(mailbox)
            assert ended.finish is not None
            assert "cannot be read" in (ended.finish.message or "")

    run(work())


def test_close_is_idempotent(short_folder: Path) -> None:
    async def work() -> None:
        async with connected(short_folder) as (_, client):
            await client.close()
            await client.close()

    run(work())
