"""One live connection of an SDK client: socket, greeting, heartbeats, and who waits for what."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
from zmq.utils.monitor import parse_monitor_message

from ..engine_core.refusal import Refused, RefusedError
from .client_messages import (
    HEARTBEAT_S,
    SDK_VERSION,
    SILENCE_S,
    ClientBye,
    ClientFlush,
    ClientHello,
    ClientInfo,
    ClientPing,
    ClientRefused,
    ClientStats,
    FromGateway,
    JsonReply,
    Pong,
    StatsReply,
    TextChunk,
    ToGateway,
    Welcome,
    decode_from_gateway,
    encode,
)
from .errors import ServerGone

RequestItem = TextChunk | ClientRefused | ServerGone
_LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class CurveKeys(NamedTuple):
    """CURVE keys of a client, 40 characters of Z85 each: the server's public key, its own pair."""

    server_key: str
    public_key: str
    secret_key: str

    @classmethod
    def from_files(cls, server_key_file: str | Path, secret_key_file: str | Path) -> "CurveKeys":
        """From files that ``zmq.auth.create_certificates`` wrote (server .key, own .key_secret)."""
        server, _ = zmq.auth.load_certificate(server_key_file)
        public, secret = zmq.auth.load_certificate(secret_key_file)
        if secret is None:
            raise ValueError(f"{secret_key_file} holds no secret key; give the .key_secret file")
        return cls(server.decode(), public.decode(), secret.decode())


class Connection:
    """A greeted connection; made by :meth:`open`. ``gone`` is set once, when it has ended."""

    def __init__(self, endpoint: str, curve: CurveKeys | None) -> None:
        self.endpoint = endpoint
        self.gone: ServerGone | None = None
        self.welcome = Welcome(0, "", 0)
        self._requests: dict[str, asyncio.Queue[RequestItem]] = {}
        self._calls: dict[int, asyncio.Future[StatsReply | JsonReply]] = {}
        self._next_call = 0
        self._greeting: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._heard = asyncio.get_running_loop().time()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)  # lets the good-bye out
        if curve is not None:
            self._use_curve(curve)
        self._monitor = self._socket.get_monitor_socket(_LOST_EVENTS | _HANDSHAKE_EVENTS)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls, endpoint: str, token: str, curve: CurveKeys | None, timeout_s: float
    ) -> Self:
        """Connect and greet. Raises ServerGone, or RefusedError when the server says no."""
        self = cls(endpoint, curve)
        try:
            try:
                self._socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise RefusedError(
                    Refused("endpoint", f"cannot connect to {endpoint!r}: {error.strerror}")
                ) from None
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._receive()),
                loop.create_task(self._watch()),
                loop.create_task(self._beat()),
            ]
            await self.send(ClientHello(SDK_VERSION, token))
            async with asyncio.timeout(timeout_s):
                self.welcome = await self._greeting
        except TimeoutError:
            await self._end()
            raise ServerGone(
                f"no answer from {endpoint} within {timeout_s:g} s; is the server running there, "
                "and do the keys match?"
            ) from None
        except BaseException:
            await self._end()
            raise
        return self

    def _use_curve(self, curve: CurveKeys) -> None:
        try:
            self._socket.curve_serverkey = curve.server_key.encode("ascii")
            self._socket.curve_publickey = curve.public_key.encode("ascii")
            self._socket.curve_secretkey = curve.secret_key.encode("ascii")
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            self._socket.close()
            self._context.term()
            raise RefusedError(Refused("curve", f"these are not CURVE keys: {error}")) from None

    async def send(self, message: ToGateway) -> None:
        """Send one message; what a dead connection cannot send is reported to its waiters."""
        if self.gone is None:
            await self._socket.send(encode(message))

    def open_request(self, rid: str) -> "asyncio.Queue[RequestItem]":
        """Where the items of request ``rid`` arrive."""
        if rid in self._requests:
            raise RefusedError(Refused("rid", f"{rid!r} is in use; choose another"))
        queue: asyncio.Queue[RequestItem] = asyncio.Queue()
        if self.gone is not None:
            queue.put_nowait(self.gone)
        self._requests[rid] = queue
        return queue

    def close_request(self, rid: str) -> None:
        """Forget a request; what still arrives for it is dropped."""
        self._requests.pop(rid, None)

    async def call(
        self, make: Callable[[int], ClientStats | ClientInfo | ClientFlush]
    ) -> StatsReply | JsonReply:
        """Send a numbered call and wait for its answer."""
        if self.gone is not None:
            raise self.gone
        number = self._next_call = self._next_call + 1
        future: asyncio.Future[StatsReply | JsonReply] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            await self.send(make(number))
            return await future
        finally:
            self._calls.pop(number, None)

    async def close(self) -> None:
        """Say good-bye and end."""
        with contextlib.suppress(zmq.ZMQError):
            await self.send(ClientBye())
        self._fail(ServerGone("this client was closed"))
        await self._end()

    async def _end(self) -> None:
        if self.gone is None:
            self.gone = ServerGone("this connection has ended")
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._greeting.done():
            self._greeting.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _fail(self, error: ServerGone) -> None:
        """Tell everybody who waits, once."""
        if self.gone is not None:
            return
        self.gone = error
        if not self._greeting.done():
            self._greeting.set_exception(error)
        for queue in self._requests.values():
            queue.put_nowait(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    async def _receive(self) -> None:
        while True:
            frame = await self._socket.recv()
            self._heard = asyncio.get_running_loop().time()
            try:
                self._dispatch(decode_from_gateway(frame))
            except msgspec.MsgspecError as error:
                self._fail(ServerGone(f"{self.endpoint} is not an outrider gateway: {error}"))
                return

    def _dispatch(self, message: FromGateway) -> None:
        match message:
            case Welcome():
                if not self._greeting.done():
                    self._greeting.set_result(message)
            case TextChunk(rid=rid):
                if rid in self._requests:
                    self._requests[rid].put_nowait(message)
            case StatsReply(call=call) | JsonReply(call=call):
                waiting = self._calls.get(call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case ClientRefused():
                self._refused(message)
            case Pong():
                pass

    def _refused(self, message: ClientRefused) -> None:
        if message.rid is not None:
            if message.rid in self._requests:
                self._requests[message.rid].put_nowait(message)
        elif message.call is not None:
            waiting = self._calls.get(message.call)
            if waiting is not None and not waiting.done():
                waiting.set_exception(RefusedError(message.refused))
        elif not self._greeting.done():
            self._greeting.set_exception(RefusedError(message.refused))
        else:
            self._fail(ServerGone(f"the server refused this client: {message.refused}"))

    async def _watch(self) -> None:
        """Learn from the socket's monitor, at once, that the server is gone."""
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] & _HANDSHAKE_EVENTS:
                self._fail(
                    ServerGone(f"{self.endpoint} refused the handshake; check the CURVE keys")
                )
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._fail(ServerGone(f"the server at {self.endpoint} is gone"))

    async def _beat(self) -> None:
        """Send signs of life, and notice a server that hangs."""
        loop = asyncio.get_running_loop()
        while self.gone is None:
            await asyncio.sleep(HEARTBEAT_S)
            if self._greeting.done():
                await self.send(ClientPing())
                if loop.time() - self._heard > SILENCE_S:
                    self._fail(
                        ServerGone(
                            f"the server at {self.endpoint} has not answered for {SILENCE_S:g} s"
                        )
                    )
