"""The engine core behind a ZeroMQ ROUTER: clients in, steps, outputs back to who asked."""

import hmac
import time
from collections.abc import Callable, Iterable

import zmq

from ..engine_core.assembly import NO_NGRAM
from ..engine_core.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    AbortRequest,
    AddCorpus,
    CallReply,
    CoreError,
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
    Shutdown,
    ToCore,
    decode_to_core,
    encode,
)
from ..engine_core.refusal import Refused
from ..engine_core.scheduler import QUEUE_FULL
from ..engine_core.worker import WorkerFailed
from .build import Engine
from .corpus_loader import CorpusLoader
from .grammar_loader import GrammarLoader
from .wakeup import Wakeup

# Larger frames are dropped by ZeroMQ with the connection; up to here they get an answer.
_FRAME_GUARD_BYTES = 4 * MAX_FRAME_BYTES
_FRAMES_A_TURN = 256
_READABLE = int(zmq.POLLIN)
_SEND_QUEUE = 100_000  # messages that wait for one client; beyond it the client counts as gone
_PROBE_S = 0.25
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 20_000  # a process that ends closes its connection; only hosts get lost
_LINGER_MS = 1000


class CoreServer:
    """Serves one engine until it is told to stop.

    A client is known once its ``Hello`` was right; until then all it gets is ``CoreError``. A
    client that a message cannot be delivered to is gone: its requests are aborted.
    """

    def __init__(self, engine: Engine, endpoint: str, token: str, wakeup: Wakeup) -> None:
        """Bind ``endpoint``. Raises zmq.ZMQError."""
        self._engine = engine
        self._core = engine.core
        self._token = token
        self._wakeup = wakeup
        self._clients: dict[bytes, set[str]] = {}
        self._owners: dict[str, bytes | None] = {}  # until the finish; None: the client is gone
        self._deadline: float | None = None
        self._next_probe = 0.0
        self._loader: CorpusLoader | None = None
        if engine.assembly.proposer is not None:
            self._loader = CorpusLoader(
                engine.assembly.proposer, engine.info.vocab_size, wakeup.wake
            )
        self._grammars: GrammarLoader | None = None
        if engine.core.grammars is not None:
            self._grammars = GrammarLoader(engine.core.grammars, wakeup.wake)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _FRAME_GUARD_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        engine.worker.watch(wakeup.wake)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(wakeup.fileno(), zmq.POLLIN)

    def run(self, drain_s: Callable[[], float | None]) -> None:
        """Serve until a stop: from a client, or once ``drain_s()`` is not None.

        A stop lets open requests finish for that many seconds and refuses new ones. Raises
        WorkerFailed after every open request was told.
        """
        try:
            while not self._over():
                if not self._core.has_work:
                    self._engine.worker.check()  # it may have failed before it was watched
                    self._idle()
                self._receive()
                self._finish_load()
                self._finish_grammars()
                self._probe()
                wanted = drain_s()
                if wanted is not None:
                    self._stop_within(wanted)
                if self._core.has_work:
                    self._deliver(self._step())
            self._end_all("the engine core is shutting down", 503)
        except BaseException as error:
            self._end_all(f"the engine core failed: {error!r}", 500)
            raise
        finally:
            self._socket.close()
            self._context.term()

    def _over(self) -> bool:
        if self._deadline is None:
            return False
        busy = self._core.has_work or bool(self._grammars)
        return not busy or time.monotonic() >= self._deadline

    def _stop_within(self, drain_s: float) -> None:
        deadline = time.monotonic() + drain_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _idle(self) -> None:
        """Sleep until a frame comes or something else wants attention."""
        timeout = int(_PROBE_S * 1000) if self._owners else None
        self._poller.poll(timeout)
        self._wakeup.clear()

    def _step(self) -> list[RequestOutput]:
        try:
            return self._core.step()
        except WorkerFailed as error:
            reason = str(error)
            # What fails is no field of a request: "name: reason" would read as one.
            outputs = self._core.fail_all(f"the worker failed: {reason.strip().splitlines()[-1]}")
            self._deliver(outputs)
            raise

    def _receive(self) -> None:
        """Handle the frames that have come, a bounded number a turn."""
        for _ in range(_FRAMES_A_TURN):
            # To ask takes less than to be refused, which is the rule between steps.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return
            client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 1:
                refused = Refused("frame", f"expected one frame a message, got {len(frames)}")
                self._send(client, CoreError(refused))
                continue
            message = decode_to_core(frames[0])
            if isinstance(message, Refused):
                self._send(client, CoreError(message))
            elif isinstance(message, Hello):
                self._greet(client, message)
            elif client not in self._clients:
                refused = Refused("hello", "the first message must be hello with the token", 401)
                self._send(client, CoreError(refused, _rid_of(message)))
            else:
                self._handle(client, message)

    def _greet(self, client: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            reason = f"this core speaks protocol {PROTOCOL_VERSION}, not {hello.version}"
            self._send(client, CoreError(Refused("version", reason)))
        elif not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            self._send(client, CoreError(Refused("token", "is not this core's token", 401)))
        else:
            self._clients.setdefault(client, set())
            self._send(client, Ready(PROTOCOL_VERSION, self._engine.info))

    def _handle(self, client: bytes, message: ToCore) -> None:
        match message:
            case GenerateRequest():
                self._submit(client, message)
            case AbortRequest():
                self._abort(client, message)
            case FlushCache(call=call):
                refused = self._core.flush_cache()
                self._reply(client, call, refused, "flushed the radix cache and learned n-grams")
            case GetStats(call=call):
                self._send(client, self._core.stats(call))
            case AddCorpus(call=call):
                refused = NO_NGRAM if self._loader is None else self._loader.start(client, message)
                if refused is not None:
                    self._reply(client, call, refused)
            case RemoveCorpus(call=call, name=name):
                refused = self._engine.assembly.remove_corpus(message)
                self._reply(client, call, refused, f"{name!r} is not loaded any more")
            case ListCorpora(call=call):
                self._send(client, CallReply(call, counts=self._corpora()))
            case Shutdown(drain_s=drain_s):
                self._stop_within(max(0.0, drain_s))
            case Hello():
                pass

    def _submit(self, client: bytes, message: GenerateRequest) -> None:
        refused: Refused | None
        if self._deadline is not None:
            refused = Refused("request", "the engine core is shutting down", 503)
        elif message.rid in self._owners:
            refused = Refused("rid", f"{message.rid!r} is in flight already; choose another id")
        elif self._grammars is not None and self._grammars.waits(message):
            refused = self._hold(self._grammars, client, message)
        else:
            refused = self._core.submit(message)
        if refused is not None:
            self._send(client, CoreError(refused, message.rid))
            return
        self._owners[message.rid] = client
        self._clients[client].add(message.rid)

    def _hold(
        self, grammars: GrammarLoader, client: bytes, message: GenerateRequest
    ) -> Refused | None:
        """Let a request wait for its grammar, if the queue has room for it."""
        limit = self._core.config.engine.max_queued_requests
        if limit is not None and len(grammars) >= limit:
            return Refused("request", QUEUE_FULL.format(limit=limit), 503)
        grammars.hold(client, message)
        return None

    def _finish_grammars(self) -> None:
        """Submit the requests whose grammars are compiled."""
        for client, message, _ in () if self._grammars is None else self._grammars.finished():
            if client not in self._clients:  # gone since, with one of these answers perhaps
                self._owners.pop(message.rid, None)
                continue
            refused = self._core.submit(message)
            if refused is not None:
                self._owners.pop(message.rid, None)
                self._clients[client].discard(message.rid)
                self._send(client, CoreError(refused, message.rid))

    def _abort(self, client: bytes, message: AbortRequest) -> None:
        """End a request of this client; of an unknown or finished one there is nothing to say."""
        mine = self._clients[client]
        wanted = sorted(mine) if message.all_requests else [message.rid]
        for rid in wanted:
            if rid not in mine:
                continue
            ended = None if self._grammars is None else self._grammars.drop(rid)
            if ended is not None:
                self._deliver([ended])
            else:
                self._core.abort(rid)

    def _finish_load(self) -> None:
        loaded = None if self._loader is None else self._loader.finished()
        if loaded is None:
            return
        client, message, built = loaded
        refused: Refused | None
        if isinstance(built, Refused):
            refused = built
        else:
            refused = self._engine.assembly.install_corpus(message, built)
        if refused is not None:
            self._reply(client, message.call, refused)
            return
        proposer = self._engine.assembly.proposer
        assert proposer is not None, "only NGRAM takes corpora"
        warning = proposer.corpora.crowding(message.name)
        text = f"loaded {message.name!r}" + (f"; {warning}" if warning else "")
        counts = {message.name: self._corpora()[message.name]}
        self._send(client, CallReply(message.call, None, text, counts))

    def _corpora(self) -> dict[str, int]:
        proposer = self._engine.assembly.proposer
        return {} if proposer is None else proposer.corpora.counts()

    def _reply(self, client: bytes, call: int, refused: Refused | None, message: str = "") -> None:
        self._send(client, CallReply(call, refused, "" if refused is not None else message))

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Send each client its outputs of a step in one message."""
        by_client: dict[bytes, list[RequestOutput]] = {}
        for output in outputs:
            client = self._owners.get(output.rid)
            if output.finish is not None:
                self._owners.pop(output.rid, None)
            if client is None:
                continue
            by_client.setdefault(client, []).append(output)
            if output.finish is not None:
                self._clients[client].discard(output.rid)
        for client, mine in by_client.items():
            self._send(client, Outputs(tuple(mine)))

    def _probe(self) -> None:
        """Now and then send clients with open requests an empty message, to see who is gone."""
        now = time.monotonic()
        if now >= self._next_probe:
            self._next_probe = now + _PROBE_S
            for client in [client for client, rids in self._clients.items() if rids]:
                self._send(client, Outputs(()))

    def _send(self, client: bytes, message: FromCore) -> None:
        try:
            self._socket.send_multipart([client, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._forget(client)

    def _forget(self, client: bytes) -> None:
        for rid in self._clients.pop(client, ()):
            if self._grammars is not None and self._grammars.drop(rid):
                self._owners.pop(rid, None)
                continue
            self._owners[rid] = None  # its finish must not reach who takes the id next
            self._core.abort(rid)

    def _end_all(self, reason: str, status: int) -> None:
        finish = FinishReason("abort", message=reason, status=status)
        self._deliver([RequestOutput(rid, b"", (), finish) for rid in list(self._owners)])


def _rid_of(message: ToCore) -> str | None:
    return message.rid if isinstance(message, GenerateRequest | AbortRequest) else None
