"""The server's end of the ZeroMQ client SDK: one ROUTER socket, many clients.

Every client is greeted first, is heard from at least every ``SILENCE_S`` seconds or loses its
requests, and can neither crash the server nor hold it up by not reading.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from ..engine_core.ids import i32
from ..engine_core.messages import FinishReason
from ..engine_core.private_dir import make_private_dir, remove_private_dir
from ..engine_core.refusal import Refused, RefusedError
from .client_messages import (
    MAX_RID_CHARS,
    MAX_SDK_FRAME_BYTES,
    SDK_VERSION,
    SILENCE_S,
    ClientAbort,
    ClientBye,
    ClientFlush,
    ClientGenerate,
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
    decode_to_gateway,
    encode,
)
from .server_config import ServerConfig
from .service import AsyncService

log = logging.getLogger("outrider.gateway")
UNREAD_FRAMES = 10_000  # a client with this many unread answers loses its connection
ServerInfo = Callable[[], Awaitable[dict[str, object]]]


class _Peer:
    """A greeted client: when it was last heard, and its requests by its own ids."""

    def __init__(self, identity: bytes, serial: int, now: float) -> None:
        self.identity = identity
        self.serial = serial
        self.heard = now
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.calls: set[asyncio.Task[None]] = set()

    @property
    def scope(self) -> str:
        """Where its request ids count; two clients may use the same one."""
        return f"sdk{self.serial}"


class Gateway:
    """Serves SDK clients on the event loop of ``service``; made by :func:`open_gateway`."""

    def __init__(
        self,
        service: AsyncService,
        config: ServerConfig,
        server_info: ServerInfo,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._service = service
        self._token = config.zmq_token or ""
        self._server_info = server_info
        self._silence_s = silence_s
        self._peers: dict[bytes, _Peer] = {}
        self._serials = itertools.count(1)
        self._context = zmq.asyncio.Context()
        self._authenticator: AsyncioAuthenticator | None = None
        self._folder: Path | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self.curve_server_key = ""
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, UNREAD_FRAMES)
        # Frames a little too large are answered politely; enormous ones are cut by the socket.
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_SDK_FRAME_BYTES)
        try:
            self._secure(config)
            self.endpoint = self._bind(config.zmq_endpoint)
        except BaseException:
            self._free()
            raise
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._receive()), loop.create_task(self._reap())]

    @property
    def num_clients(self) -> int:
        """Clients that are connected and greeted."""
        return len(self._peers)

    def drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._draining = True

    async def close(self) -> None:
        """Abort what runs and close; idempotent."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._free()

    def _secure(self, config: ServerConfig) -> None:
        if config.zmq_curve_secret_key_file is None:
            return
        try:
            public, secret = zmq.auth.load_certificate(config.zmq_curve_secret_key_file)
        except (OSError, ValueError) as error:
            raise RefusedError(Refused("zmq_curve_secret_key_file", str(error))) from None
        if secret is None:
            raise RefusedError(
                Refused("zmq_curve_secret_key_file", "holds no secret key; give the .key_secret")
            )
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=config.zmq_curve_clients_dir or "")
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.curve_server = True
        self.curve_server_key = public.decode()

    def _bind(self, endpoint: str | None) -> str:
        if endpoint is None:
            self._folder = make_private_dir()
            endpoint = f"ipc://{self._folder}/sdk"
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise RefusedError(
                Refused("zmq_endpoint", f"cannot bind {endpoint!r}: {error.strerror}")
            ) from None
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _free(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._socket.close()
        self._context.term()
        if self._folder is not None:
            remove_private_dir(self._folder)

    async def _receive(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            if len(frames) == 1:
                message = decode_to_gateway(frames[0])
            else:
                message = Refused("frame", f"a message is one frame, got {len(frames)}")
            try:
                self._take(identity, message)
            except Exception:  # one client's message must not end the server
                log.exception("a client's message could not be handled")
                self._post(identity, ClientRefused(Refused("message", "internal error", 500)))

    def _take(self, identity: bytes, message: ToGateway | Refused) -> None:
        peer = self._peers.get(identity)
        if isinstance(message, Refused):
            self._post(identity, ClientRefused(message))
        elif isinstance(message, ClientHello):
            self._greet(identity, message)
        elif peer is None:
            refused = Refused("hello", "greet first: the first message is client_hello", 401)
            self._post(identity, ClientRefused(refused))
        else:
            peer.heard = asyncio.get_running_loop().time()
            self._serve(peer, message)

    def _greet(self, identity: bytes, hello: ClientHello) -> None:
        if hello.version != SDK_VERSION:
            refused = Refused(
                "version", f"this server speaks SDK protocol {SDK_VERSION}, not {hello.version}"
            )
            self._post(identity, ClientRefused(refused))
        elif not secrets.compare_digest(hello.token.encode(), self._token.encode()):
            refused = Refused("token", "is not the one this server asks for (--zmq-token)", 401)
            self._post(identity, ClientRefused(refused))
        else:
            if identity not in self._peers:
                now = asyncio.get_running_loop().time()
                self._peers[identity] = _Peer(identity, next(self._serials), now)
            info = self._service.info
            self._post(identity, Welcome(SDK_VERSION, info.model, info.context_length))

    def _serve(self, peer: _Peer, message: ToGateway) -> None:
        match message:
            case ClientGenerate():
                self._start(peer, message)
            case ClientAbort(rid=rid, all_requests=all_requests):
                for one in list(peer.tasks) if all_requests else [rid]:
                    self._abort(peer, one)
            case ClientStats() | ClientInfo() | ClientFlush():
                task = asyncio.create_task(self._answer(peer, message))
                peer.calls.add(task)
                task.add_done_callback(peer.calls.discard)
            case ClientPing():
                self._post(peer.identity, Pong())
            case ClientBye():
                self._drop(peer)
            case ClientHello():
                pass  # answered before

    def _start(self, peer: _Peer, request: ClientGenerate) -> None:
        refused = self._refuse(peer, request)
        if refused is not None:
            self._post(peer.identity, ClientRefused(refused, rid=request.rid))
            return
        ended: set[int] = set()
        task = asyncio.create_task(self._generate(peer, request, ended))
        peer.tasks[request.rid] = task
        task.add_done_callback(partial(self._done, peer, request, ended))

    def _done(
        self, peer: _Peer, request: ClientGenerate, ended: set[int], task: asyncio.Task[None]
    ) -> None:
        """A task that is cancelled before it began runs nothing of its own: it ends here."""
        peer.tasks.pop(request.rid, None)
        if not task.cancelled() or self._peers.get(peer.identity) is not peer:
            return
        for index in set(range(request.params.n)) - ended:
            aborted = FinishReason("abort", message="aborted by the client")
            self._post(peer.identity, TextChunk(request.rid, index, "", b"", finish=aborted))

    def _refuse(self, peer: _Peer, request: ClientGenerate) -> Refused | None:
        if self._draining:
            return Refused("server", "is shutting down; try another one", 503)
        if not 1 <= len(request.rid) <= MAX_RID_CHARS:
            return Refused("rid", f"must have 1 to {MAX_RID_CHARS} characters")
        if request.rid in peer.tasks:
            return Refused("rid", f"{request.rid!r} is in flight already; choose another id")
        if len(request.token_ids) % 4:
            return Refused("prompt", "token ids travel as int32 bytes, a multiple of 4")
        if request.text is not None and request.token_ids:
            return Refused("prompt", "is text or token ids, not both")
        return None

    async def _generate(self, peer: _Peer, request: ClientGenerate, ended: set[int]) -> None:
        """``ended``: collects the samples whose last chunk is sent."""
        try:
            deltas = self._service.generate(
                request.text if request.text is not None else i32(request.token_ids).tolist(),
                request.params,
                rid=request.rid,
                priority=request.priority,
                cache_salt=request.cache_salt,
                speculative=request.speculative,
                stream=request.stream,
                scope=peer.scope,
            )
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    if delta.finish is not None:
                        ended.add(delta.index)
                    meta = msgspec.structs.replace(delta.meta_info, id=request.rid)
                    self._post(
                        peer.identity,
                        TextChunk(
                            rid=request.rid,
                            index=delta.index,
                            text=delta.text,
                            tokens=array("i", delta.tokens).tobytes(),
                            logprobs=delta.logprobs,
                            finish=delta.finish,
                            meta_info=None if delta.finish is None else meta,
                            prompt_logprobs=delta.prompt_logprobs,
                        ),
                    )
        except RefusedError as error:
            self._post(peer.identity, ClientRefused(error.refused, rid=request.rid))
        except Exception:
            log.exception("request %s failed", request.rid)
            refused = Refused("request", "internal error; see the server's log", 500)
            self._post(peer.identity, ClientRefused(refused, rid=request.rid))

    def _abort(self, peer: _Peer, rid: str) -> None:
        task = peer.tasks.get(rid)
        if task is not None and not self._service.abort(rid, peer.scope):
            task.cancel()

    async def _answer(self, peer: _Peer, message: ClientStats | ClientInfo | ClientFlush) -> None:
        reply: FromGateway
        try:
            match message:
                case ClientStats(call=call):
                    reply = StatsReply(call, await self._service.core.stats())
                case ClientInfo(call=call):
                    reply = JsonReply(call, msgspec.json.encode(await self._server_info()))
                case ClientFlush(call=call):
                    flushed = await self._service.core.flush_cache()
                    if flushed.refused is not None:
                        raise RefusedError(flushed.refused)
                    reply = JsonReply(call, b"{}")
        except RefusedError as error:
            reply = ClientRefused(error.refused, call=message.call)
        except Exception:
            log.exception("a call failed")
            reply = ClientRefused(Refused("call", "internal error", 500), call=message.call)
        self._post(peer.identity, reply)

    def _post(self, identity: bytes, message: FromGateway) -> None:
        """Send without ever waiting; a client that vanished or does not read is dropped."""
        sent = self._socket.send_multipart([identity, encode(message)], flags=zmq.DONTWAIT)
        assert isinstance(sent, asyncio.Future)  # DONTWAIT: it is done already
        error = sent.exception()
        if error is None:
            return
        peer = self._peers.get(identity)
        if peer is not None:
            log.info("client %d dropped: %s", peer.serial, error)
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.pop(peer.identity, None)
        current = asyncio.current_task()
        for task in (*peer.tasks.values(), *peer.calls):
            if task is current:
                # A task that posts to its own lost client ends at its next await.
                asyncio.get_running_loop().call_soon(task.cancel)
            else:
                task.cancel()

    async def _reap(self) -> None:
        """Drop clients that have been silent for too long; the core forgets their requests."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._silence_s / 5)
            now = loop.time()
            for peer in list(self._peers.values()):
                if now - peer.heard > self._silence_s:
                    log.info("client %d dropped: silent for %.1f s", peer.serial, self._silence_s)
                    self._drop(peer)
