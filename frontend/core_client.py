"""A connection to an engine core: requests out, merged outputs in, and a core that dies noticed."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ..engine_core.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    AbortRequest,
    AddCorpus,
    CallReply,
    CoreError,
    CoreInfo,
    CoreStats,
    FinishReason,
    FlushCache,
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
from ..engine_core.refusal import Refused, RefusedError

MAX_OPEN_REQUESTS = 65536  # beyond it requests are refused with 503
ALIVE_POLL_S = 0.2
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 20_000  # ZeroMQ's own thread answers, so only a lost host misses it

Call = FlushCache | GetStats | AddCorpus | RemoveCorpus | ListCorpora


class Mailbox:
    """Outputs of some requests, merged until they are read.

    A slow reader costs no memory beyond the tokens themselves and gets fewer, larger outputs.
    """

    def __init__(self) -> None:
        self._pending: dict[str, list[RequestOutput]] = {}
        self._filled = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add one output."""
        self._pending.setdefault(output.rid, []).append(output)
        self._filled.set()

    async def take(self) -> list[RequestOutput]:
        """Wait for outputs and return them, at most one a request."""
        await self._filled.wait()
        pending, self._pending = self._pending, {}
        self._filled.clear()
        return [_merge(outputs) for outputs in pending.values()]


def _merge(outputs: list[RequestOutput]) -> RequestOutput:
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    return RequestOutput(
        rid=last.rid,
        tokens=b"".join(output.tokens for output in outputs),
        logprobs=tuple(itertools.chain.from_iterable(output.logprobs for output in outputs)),
        finish=last.finish,
        stats=last.stats,
        prompt_logprobs=tuple(
            itertools.chain.from_iterable(output.prompt_logprobs for output in outputs)
        ),
    )


class CoreClient:
    """Asyncio client of one core. Made by :func:`connect_core`; belongs to one event loop.

    ``alive`` is polled five times a second; with it, and with the connection's own end, a dead
    core fails every open request and call within a second. ``dead`` is set then, for good.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        alive: Callable[[], bool] | None = None,
        max_open_requests: int = MAX_OPEN_REQUESTS,
    ) -> None:
        self.dead = asyncio.Event()
        self.dead_reason = ""
        self.last_message = time.monotonic()
        self._socket = socket
        self._monitor: zmq.asyncio.Socket = socket.get_monitor_socket()
        self._alive = alive
        self._max_open = max_open_requests
        self._mailboxes: dict[str, Mailbox] = {}
        self._forgotten: set[str] = set()  # aborted, their finish is still to come
        self._calls: dict[int, asyncio.Future[CallReply | CoreStats]] = {}
        self._call_ids = itertools.count(1)
        self._ready: asyncio.Future[CoreInfo] = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(task) for task in (self._read(), self._watch(), self._poll())
        ]

    @property
    def open_requests(self) -> int:
        """Requests that were submitted and have not finished."""
        return len(self._mailboxes)

    def is_open(self, rid: str) -> bool:
        """Whether a request of this id is in flight."""
        return rid in self._mailboxes

    async def hello(self, token: str, timeout_s: float) -> CoreInfo:
        """Greet the core. Raises RefusedError when it refuses or does not answer in time."""
        await self._send(Hello(PROTOCOL_VERSION, token))
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise RefusedError(
                Refused("endpoint", f"no core answered within {timeout_s:g} s; is it running?", 503)
            ) from None

    def submit(self, requests: Sequence[GenerateRequest], mailbox: Mailbox) -> None:
        """Send requests whose outputs go to ``mailbox``; never waits, so it cannot end halfway.

        Raises RefusedError for a dead core, an id in flight (a forgotten one is until the core
        has ended it), or too many open requests; then none was sent.
        """
        self._refuse_dead()
        if len(self._mailboxes) + len(requests) > self._max_open:
            raise RefusedError(
                Refused("request", f"{self._max_open} requests are open; try again later", 503)
            )
        frames = [encode(request) for request in requests]
        new: set[str] = set()
        for request, frame in zip(requests, frames, strict=True):
            taken = request.rid in self._mailboxes or request.rid in self._forgotten
            if taken or request.rid in new:
                raise RefusedError(
                    Refused("rid", f"{request.rid!r} is in flight already; choose another id")
                )
            if len(frame) > MAX_FRAME_BYTES:
                raise RefusedError(
                    Refused("prompt", f"exceeds {MAX_FRAME_BYTES} bytes; shorten it", 413)
                )
            new.add(request.rid)
        self._mailboxes.update((request.rid, mailbox) for request in requests)
        for frame in frames:
            self._post(frame)

    def abort(self, rid: str) -> bool:
        """Ask for the end of a request; False if it is not in flight. Its finish still arrives."""
        if rid not in self._mailboxes:
            return False
        self._post(encode(AbortRequest(rid)))
        return True

    def forget(self, rid: str) -> None:
        """Abort a request whose outputs nobody reads any more."""
        if self.abort(rid):
            self._mailboxes.pop(rid, None)
            if not self.dead.is_set():
                self._forgotten.add(rid)

    def abort_all(self) -> int:
        """Ask for the end of all requests of this client; returns how many were open."""
        count = len(self._mailboxes)
        if count:
            self._post(encode(AbortRequest("", all_requests=True)))
        return count

    async def stats(self, timeout_s: float = 10.0) -> CoreStats:
        """Gauges and counters of the core. Raises RefusedError (503) when it does not answer."""
        answer = await self._call(GetStats(next(self._call_ids)), timeout_s)
        assert isinstance(answer, CoreStats)
        return answer

    async def flush_cache(self, timeout_s: float = 10.0) -> CallReply:
        """Empty the radix cache and the learned n-grams."""
        return await self._reply(FlushCache(next(self._call_ids)), timeout_s)

    async def add_corpus(
        self,
        name: str,
        documents: Sequence[bytes],
        tenant: str | None = None,
        timeout_s: float = 600.0,
    ) -> CallReply:
        """Add a tokenized corpus; ``documents``: int32 bytes each."""
        call = AddCorpus(next(self._call_ids), name, tuple(documents), tenant)
        return await self._reply(call, timeout_s)

    async def remove_corpus(self, name: str, timeout_s: float = 60.0) -> CallReply:
        """Remove a corpus."""
        return await self._reply(RemoveCorpus(next(self._call_ids), name), timeout_s)

    async def list_corpora(self, timeout_s: float = 10.0) -> CallReply:
        """Token counts of the corpora by name."""
        return await self._reply(ListCorpora(next(self._call_ids)), timeout_s)

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Ask the core to stop."""
        await self._send(Shutdown(drain_s))

    def fail_all(self, reason: str) -> None:
        """Declare the core dead: end every open request and call with ``reason``. Idempotent."""
        if self.dead.is_set():
            return
        self.dead_reason = reason
        self.dead.set()
        mailboxes, self._mailboxes = self._mailboxes, {}
        self._forgotten.clear()
        self._end(mailboxes, reason, 503)
        if not self._ready.done():
            self._ready.set_exception(RefusedError(Refused("core", reason, 503)))
            self._ready.exception()  # nobody may be waiting; marks it as seen

    async def close(self) -> None:
        """Close the connection; open requests end as if the core had died. Idempotent."""
        self.fail_all("the connection to the engine core was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)

    def _refuse_dead(self) -> None:
        if self.dead.is_set():
            raise RefusedError(Refused("core", self.dead_reason, 503))

    def _post(self, frame: bytes) -> None:
        """Send without waiting; the high-water mark is off, so this never blocks.

        A frame that cannot be sent ends the connection, and with it what the frame was for.
        """
        try:
            sent = self._socket.send(frame)
        except zmq.ZMQError as error:
            self._broken(error)
            return
        if isinstance(sent, asyncio.Future):
            sent.add_done_callback(self._posted)

    def _posted(self, sent: "asyncio.Future[object]") -> None:
        error = None if sent.cancelled() else sent.exception()
        if error is not None:
            self._broken(error)

    def _broken(self, error: BaseException) -> None:
        self.fail_all(f"the connection to the engine core broke: {error}")

    async def _send(self, message: ToCore) -> None:
        self._refuse_dead()
        frame = encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise RefusedError(
                Refused("documents", f"exceed {MAX_FRAME_BYTES} bytes; send fewer", 413)
            )
        await self._socket.send(frame)

    async def _reply(self, call: Call, timeout_s: float) -> CallReply:
        answer = await self._call(call, timeout_s)
        assert isinstance(answer, CallReply)
        return answer

    async def _call(self, call: Call, timeout_s: float) -> CallReply | CoreStats:
        self._refuse_dead()
        future: asyncio.Future[CallReply | CoreStats] = asyncio.get_running_loop().create_future()
        self._calls[call.call] = future
        try:
            await self._send(call)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RefusedError(
                Refused("core", f"no answer within {timeout_s:g} s; try again later", 503)
            ) from None
        finally:
            self._calls.pop(call.call, None)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv()
            self.last_message = time.monotonic()
            try:
                message = decode_from_core(frame)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                self.fail_all(f"the engine core sent a frame that cannot be read: {error}")
                return
            self._take(message)

    def _take(self, message: Ready | Outputs | CallReply | CoreStats | CoreError) -> None:
        match message:
            case Outputs(outputs=outputs):
                for output in outputs:
                    self._deliver(output)
            case CallReply() | CoreStats():
                future = self._calls.get(message.call)
                if future is not None and not future.done():
                    future.set_result(message)
            case CoreError(refused=refused, rid=rid):
                self._take_error(refused, rid)
            case Ready(info=info):
                if not self._ready.done():
                    self._ready.set_result(info)

    def _take_error(self, refused: Refused, rid: str | None) -> None:
        if rid is not None:
            finish = FinishReason("abort", message=str(refused), status=refused.status)
            self._deliver(RequestOutput(rid, b"", (), finish))
        elif not self._ready.done():
            self._ready.set_exception(RefusedError(refused))
        else:
            self._fail_open(f"the engine core could not read a message: {refused}")

    def _fail_open(self, reason: str) -> None:
        """End every open request and call, for any may be the one that was not read.

        The core ends those that it knows; the ids of the others are not free again.
        """
        self.abort_all()
        mailboxes, self._mailboxes = self._mailboxes, {}
        self._forgotten.update(mailboxes)
        self._end(mailboxes, reason, 500)

    def _end(self, mailboxes: Mapping[str, Mailbox], reason: str, status: int) -> None:
        """Tell the readers of requests, and all that wait for a call."""
        finish = FinishReason("abort", message=reason, status=status)
        for rid, mailbox in mailboxes.items():
            mailbox.put(RequestOutput(rid, b"", (), finish))
        error = RefusedError(Refused("core", reason, status))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._calls.clear()

    def _deliver(self, output: RequestOutput) -> None:
        mailbox = self._mailboxes.get(output.rid)
        if mailbox is None:
            if output.finish is not None:
                self._forgotten.discard(output.rid)
            return
        if output.finish is not None:
            del self._mailboxes[output.rid]
        mailbox.put(output)

    async def _watch(self) -> None:
        """A lost connection is a lost core: it knows this client's requests no longer."""
        while True:
            event: Mapping[str, object] = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self.fail_all("the engine core is gone (connection lost); its requests failed")
                return

    async def _poll(self) -> None:
        while self._alive is not None:
            if not self._alive():
                self.fail_all("the engine core process died; its requests failed")
                return
            await asyncio.sleep(ALIVE_POLL_S)


async def connect_core(
    endpoint: str,
    token: str = "",
    *,
    alive: Callable[[], bool] | None = None,
    timeout_s: float = 60.0,
    configure: Callable[[zmq.asyncio.Socket], None] | None = None,
) -> tuple[CoreClient, CoreInfo]:
    """Connect to the core at a ZeroMQ ``endpoint`` and greet it.

    ``configure`` may set socket options (CURVE keys) before the connection is made. Raises
    RefusedError when the core refuses the token or version, or does not answer in time.
    """
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    if configure is not None:
        configure(socket)
    client = CoreClient(socket, alive)
    try:
        socket.connect(endpoint)
        return client, await client.hello(token, timeout_s)
    except BaseException:
        with contextlib.suppress(zmq.ZMQError):
            await client.close()
        raise
