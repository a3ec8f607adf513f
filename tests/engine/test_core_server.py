"""A core behind a real socket: greeting, routing, refusals, corpora, clients that vanish."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.build import Engine, build_engine
from outrider.engine.core_server import CoreServer
from outrider.engine.wakeup import Wakeup
from outrider.engine.worker import TorchWorker
from outrider.engine_core.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    AbortRequest,
    AddCorpus,
    CallReply,
    CoreError,
    CoreStats,
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
    Shutdown,
    ToCore,
    decode_from_core,
    encode,
)
from outrider.engine_core.plan import HostDrafts, StepPlan, StepResult
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.worker import WorkerFailed

from .cores import tiny_config, tokens_of
from .tiny import write_checkpoint

VOCAB = 40
TOKEN = "secret"
LONG = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)


class Peer:
    """A bare DEALER; what it gets is sorted by request."""

    def __init__(self, endpoint: str, greet: bool = True) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        if greet:
            self.send(Hello(PROTOCOL_VERSION, TOKEN))
            assert isinstance(self.take(), Ready)

    def send(self, message: ToCore) -> None:
        self.socket.send(encode(message))

    def take(self, timeout_s: float = 20.0) -> FromCore:
        """The next message that is not an empty probe."""
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            message = decode_from_core(self.socket.recv())
            if message != Outputs(()):
                return message
        raise TimeoutError("no message from the core")

    def call(self, message: ToCore) -> FromCore:
        self.send(message)
        return self.take()

    def finish(self, *rids: str) -> dict[str, list[RequestOutput]]:
        """Outputs until all of these requests have ended."""
        outputs: dict[str, list[RequestOutput]] = {rid: [] for rid in rids}
        while not all(some and some[-1].finish for some in outputs.values()):
            message = self.take()
            assert isinstance(message, Outputs), message
            for output in message.outputs:
                outputs[output.rid].append(output)
        return outputs

    def close(self) -> None:
        self._context.destroy(linger=0)


class Served:
    """A core server in a thread. Its steps take 5 ms more, so that long requests stay open."""

    def __init__(self, engine: Engine, endpoint: str) -> None:
        assert isinstance(engine.worker, TorchWorker)
        runner = engine.worker._runner
        run = runner.run

        def slow(plan: StepPlan, drafts: HostDrafts | None) -> StepResult:
            time.sleep(0.005)
            return run(plan, drafts)

        runner.run = slow  # type: ignore[method-assign]
        self.engine = engine
        self.endpoint = endpoint
        self.wakeup = Wakeup()
        self.drain: float | None = None
        self.error: BaseException | None = None
        self.server = CoreServer(engine, endpoint, TOKEN, self.wakeup)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run(self._wanted)
        except BaseException as error:
            self.error = error

    def _wanted(self) -> float | None:
        wanted, self.drain = self.drain, None
        return wanted

    def stop(self, drain_s: float = 0.0) -> None:
        self.drain = drain_s
        self.wakeup.wake()
        self.thread.join(30.0)
        assert not self.thread.is_alive()
        self.engine.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", VOCAB)


@pytest.fixture(scope="module")
def start(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    def make(**fields: object) -> Served:
        config = tiny_config(folder, "NGRAM", speculative_ngram_external_sam_budget=3, **fields)
        return Served(build_engine(config), f"ipc://{tmp_path_factory.mktemp('s')}/core")

    return make


@pytest.fixture(scope="module")
def served(start: Callable[..., Served]) -> Iterator[Served]:
    served = start()
    yield served
    served.stop()
    assert served.error is None


@pytest.fixture
def peer(served: Served) -> Iterator[Peer]:
    peer = Peer(served.endpoint)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def fuzzer(served: Served) -> Iterator[Peer]:
    peer = Peer(served.endpoint, greet=False)
    yield peer
    peer.close()


def ask(rid: str, params: SamplingParams = SHORT, first: int = 1) -> GenerateRequest:
    return GenerateRequest(rid, np.array([first, 2, 3], np.int32).tobytes(), params)


def stats(peer: Peer) -> CoreStats:
    answer = peer.call(GetStats(7))
    assert isinstance(answer, CoreStats)
    return answer


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)


def test_outputs_go_to_the_client_that_asked(served: Served, peer: Peer) -> None:
    other = Peer(served.endpoint)
    peer.send(ask("mine"))
    other.send(ask("theirs", first=5))
    (mine,) = peer.finish("mine").values()
    (theirs,) = other.finish("theirs").values()
    assert len(tokens_of(mine)) == len(tokens_of(theirs)) == 6
    assert len(mine) > 1, "a stream comes in pieces"
    last = mine[-1].stats
    assert last is not None
    assert last.completion_tokens == 6
    other.close()


def test_the_greeting_is_checked(served: Served) -> None:
    peer = Peer(served.endpoint, greet=False)
    for message, field in (
        (ask("early"), "hello"),
        (GetStats(1), "hello"),
        (Hello(PROTOCOL_VERSION, "guess"), "token"),
        (Hello(PROTOCOL_VERSION, "gu\u00e9ss"), "token"),
        (Hello(PROTOCOL_VERSION + 1, TOKEN), "version"),
        (ask("still early"), "hello"),
    ):
        answer = peer.call(message)
        assert isinstance(answer, CoreError)
        assert answer.refused.field == field
    named = peer.call(ask("named"))
    assert isinstance(named, CoreError)
    assert (named.refused.status, named.rid) == (401, "named")
    ready = peer.call(Hello(PROTOCOL_VERSION, TOKEN))
    assert isinstance(ready, Ready)
    assert (ready.info.vocab_size, ready.info.drafter) == (VOCAB, "NGRAM")
    peer.close()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (ask("", SHORT), "rid"),
        (ask("a", SamplingParams(top_p=2.0)), "top_p"),
        (GenerateRequest("b", b"", SHORT), "prompt"),
        (GenerateRequest("c", b"123", SHORT), "prompt"),
        (ask("d", SHORT, first=VOCAB), "prompt"),
        (ask("e", msgspec.structs.replace(SHORT, stop=("x",))), "stop"),
    ],
)
def test_requests_are_refused_with_their_id(
    peer: Peer, message: GenerateRequest, field: str
) -> None:
    answer = peer.call(message)
    assert isinstance(answer, CoreError)
    assert (answer.refused.field, answer.rid) == (field, message.rid)


def test_a_second_request_of_an_id_is_refused_and_the_first_goes_on(peer: Peer) -> None:
    peer.send(ask("twice", LONG))
    peer.send(ask("twice", LONG))
    seen: list[FromCore] = []
    while not any(isinstance(message, CoreError) for message in seen):
        seen.append(peer.take())
    peer.send(AbortRequest("twice"))
    (outputs,) = peer.finish("twice").values()
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.kind == "abort"


def test_only_the_owner_can_abort(served: Served, peer: Peer) -> None:
    other = Peer(served.endpoint)
    peer.send(ask("kept", msgspec.structs.replace(LONG, max_new_tokens=120)))
    other.send(AbortRequest("kept"))
    other.send(AbortRequest("", all_requests=True))
    (outputs,) = peer.finish("kept").values()
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.kind == "length"
    peer.send(ask("x", LONG))
    peer.send(ask("y", LONG))
    peer.send(AbortRequest("", all_requests=True))
    ended = peer.finish("x", "y")
    assert {some[-1].finish.kind for some in ended.values() if some[-1].finish} == {"abort"}
    other.close()


def test_a_client_that_vanishes_loses_its_requests_only(served: Served, peer: Peer) -> None:
    gone = Peer(served.endpoint)
    quiet = msgspec.structs.replace(LONG, max_new_tokens=480)
    for number in range(4):
        message = msgspec.structs.replace(ask(f"gone{number}", quiet), stream=False)
        gone.send(message)
    wait_until(lambda: stats(peer).running >= 4)
    aborts = stats(peer).aborts
    gone.close()
    wait_until(lambda: stats(peer).aborts == aborts + 4)
    wait_until(lambda: stats(peer).running == 0)
    peer.send(ask("after"))
    assert peer.finish("after")


def test_an_id_of_a_vanished_client_is_free_after_its_finish(folder: Path, tmp_path: Path) -> None:
    engine = build_engine(tiny_config(folder, "NGRAM"))
    wakeup = Wakeup()
    server = CoreServer(engine, f"ipc://{tmp_path}/core", TOKEN, wakeup)
    gone, next_one = (Peer(f"ipc://{tmp_path}/core", greet=False) for _ in range(2))

    def tell(peer: Peer, message: ToCore, done: Callable[[], bool]) -> None:
        peer.send(message)
        while not done():
            server._receive()

    tell(gone, Hello(PROTOCOL_VERSION, TOKEN), lambda: len(server._clients) == 1)
    (identity,) = server._clients
    tell(next_one, Hello(PROTOCOL_VERSION, TOKEN), lambda: len(server._clients) == 2)
    assert isinstance(next_one.take(), Ready)
    tell(gone, ask("same", LONG), lambda: server._owners == {"same": identity})
    server._deliver(server._step())
    server._forget(identity)
    assert engine.core.has_work, "the finish waits to be delivered"
    tell(next_one, ask("same"), lambda: next_one.socket.poll(1) != 0)
    answer = next_one.take()
    assert isinstance(answer, CoreError)
    assert answer.refused.field == "rid"
    while engine.core.has_work:
        server._deliver(server._step())
    assert server._owners == {}
    tell(next_one, ask("same"), lambda: "same" in server._owners)
    while engine.core.has_work:
        server._deliver(server._step())
    (outputs,) = next_one.finish("same").values()
    assert outputs[-1].finish is not None
    assert (outputs[-1].finish.kind, len(tokens_of(outputs))) == ("length", 6)
    wakeup.wake()
    server.run(lambda: 0.0)
    engine.shutdown()
    gone.close()
    next_one.close()


def test_junk_is_answered_and_harms_nothing(served: Served, peer: Peer) -> None:
    for frames in (
        [b""],
        [b"\x93"],
        [b"\xc1" * 9],
        [encode(Hello(PROTOCOL_VERSION, TOKEN)), b"more"],
        [bytes(MAX_FRAME_BYTES + 1)],
        [encode(GetStats(1))[:-1]],
    ):
        peer.socket.send_multipart(frames)
        answer = peer.take()
        assert isinstance(answer, CoreError)
        assert answer.refused.field == "frame"
    assert stats(peer).running == 0


@settings(max_examples=60)
@given(st.binary(max_size=60))
def test_random_frames_never_end_the_server(served: Served, fuzzer: Peer, frame: bytes) -> None:
    fuzzer.socket.send(frame)
    assert isinstance(fuzzer.take(), CoreError)
    assert served.thread.is_alive()


def test_corpora_load_one_at_a_time_and_are_listed(peer: Peer) -> None:
    documents = tuple(np.tile(np.arange(5, 25, dtype=np.int32), 400).tobytes() for _ in range(20))
    peer.send(AddCorpus(1, "big", documents))
    peer.send(AddCorpus(2, "second", documents))
    answers = {}
    for _ in range(2):
        answer = peer.take()
        assert isinstance(answer, CallReply)
        answers[answer.call] = answer
    assert answers[2].refused is not None
    assert answers[2].refused.status == 503
    assert answers[1].refused is None
    total = 20 * 8000 + 19
    assert answers[1].counts == {"big": total}
    listed = peer.call(ListCorpora(3))
    assert isinstance(listed, CallReply)
    assert listed.counts == {"big": total}
    again = peer.call(AddCorpus(4, "big", documents[:1]))
    assert isinstance(again, CallReply)
    assert again.refused is not None
    assert peer.call(RemoveCorpus(5, "big")) == CallReply(5, None, "'big' is not loaded any more")
    assert peer.call(ListCorpora(6)) == CallReply(6)


def test_the_reply_says_when_corpora_outnumber_their_draft_nodes(
    served: Served, peer: Peer
) -> None:
    proposer = served.engine.assembly.proposer
    assert proposer is not None
    document = np.arange(5, 15, dtype=np.int32).tobytes()
    budget = proposer.corpora.budget
    names = [f"c{i}" for i in range(budget + 1)]
    for i, name in enumerate(names):
        answer = peer.call(AddCorpus(i, name, (document,)))
        assert isinstance(answer, CallReply)
        assert answer.refused is None
        assert ("only the first" in answer.message) is (i == budget)
    for name in names:
        peer.call(RemoveCorpus(99, name))


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        ((b"12345",), "document 0 is not int32"),
        ((b"", np.array([VOCAB], np.int32).tobytes()), "document 1 has a token outside"),
        ((b"",), "empty"),
    ],
)
def test_bad_corpora_are_refused(peer: Peer, documents: tuple[bytes, ...], reason: str) -> None:
    answer = peer.call(AddCorpus(1, "bad", documents))
    assert isinstance(answer, CallReply)
    assert answer.refused is not None
    assert reason in answer.refused.reason


def test_flush_needs_an_idle_core(peer: Peer) -> None:
    assert stats(peer).cached_pages >= 0
    peer.send(ask("busy", LONG))
    busy = peer.call(FlushCache(1))
    while not isinstance(busy, CallReply):
        busy = peer.take()
    assert busy.refused is not None
    peer.send(AbortRequest("busy"))
    peer.finish("busy")
    wait_until(lambda: stats(peer).running == 0)
    done = peer.call(FlushCache(2))
    assert isinstance(done, CallReply)
    assert done.refused is None
    assert stats(peer).cached_pages == 0


def test_an_idle_server_sleeps(served: Served, peer: Peer) -> None:
    peer.send(ask("warm"))
    peer.finish("warm")
    clock = time.pthread_getcpuclockid(served.thread.ident or 0)
    before = time.clock_gettime(clock)
    time.sleep(0.4)
    assert time.clock_gettime(clock) - before < 0.02


def test_a_drain_finishes_what_runs_and_refuses_the_rest(start: Callable[..., Served]) -> None:
    served = start()
    peer = Peer(served.endpoint)
    peer.send(ask("open", msgspec.structs.replace(LONG, max_new_tokens=200)))
    peer.take()
    peer.send(Shutdown(20.0))
    peer.send(ask("late"))
    seen: list[FromCore] = []
    while not any(isinstance(message, CoreError) for message in seen):
        seen.append(peer.take())
    error = seen[-1]
    assert isinstance(error, CoreError)
    assert (error.rid, error.refused.status) == ("late", 503)
    (outputs,) = peer.finish("open").values()
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.kind == "length"
    served.thread.join(10.0)
    assert not served.thread.is_alive()
    assert served.error is None
    served.engine.shutdown()
    peer.close()


def test_a_stop_without_patience_tells_every_open_request(start: Callable[..., Served]) -> None:
    served = start()
    peer = Peer(served.endpoint)
    peer.send(ask("open", msgspec.structs.replace(LONG, max_new_tokens=480)))
    peer.take()
    served.stop(0.0)
    (outputs,) = peer.finish("open").values()
    assert outputs[-1].finish is not None
    assert (outputs[-1].finish.kind, outputs[-1].finish.status) == ("abort", 503)
    peer.close()


def test_a_worker_that_failed_before_it_was_watched_ends_an_idle_server(
    start: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(worker: TorchWorker) -> None:
        raise WorkerFailed("gone already")

    monkeypatch.setattr(TorchWorker, "check", failed)
    served = start()
    served.thread.join(10.0)
    assert not served.thread.is_alive()
    assert "gone already" in str(served.error)
    served.engine.shutdown()


def test_a_failing_worker_ends_every_request_with_500(
    start: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = start()
    assert isinstance(served.engine.worker, TorchWorker)
    runner = served.engine.worker._runner
    run = runner.run

    def fail(plan: StepPlan, drafts: HostDrafts | None) -> StepResult:
        if plan.step > 5:
            raise RuntimeError("planted damage")
        return run(plan, drafts)

    monkeypatch.setattr(runner, "run", fail)
    peer = Peer(served.endpoint)
    peer.send(ask("a", LONG))
    peer.send(ask("b", LONG, first=9))
    for outputs in peer.finish("a", "b").values():
        finish = outputs[-1].finish
        assert finish is not None
        assert (finish.kind, finish.status) == ("abort", 500)
        assert "planted damage" in (finish.message or "")
    served.thread.join(10.0)
    assert "planted damage" in str(served.error)
    served.engine.shutdown()
    peer.close()
