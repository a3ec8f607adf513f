"""ZeroMQ client SDK: generate, stream, abort and read stats of a served engine, without HTTP.

``AsyncClient`` holds all of it; ``Client`` runs one in a thread for synchronous code.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np

from ..engine_core.messages import CoreStats
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.sampling_params import SamplingParams
from .announcements import find_server
from .client_connection import Connection, CurveKeys
from .client_messages import (
    ClientAbort,
    ClientFlush,
    ClientGenerate,
    ClientInfo,
    ClientRefused,
    ClientStats,
    JsonReply,
    StatsReply,
    TextChunk,
    Welcome,
)
from .errors import RequestFailed, ServerGone
from .loop_thread import LoopThread
from .results import Chunk, Collector, GenerationResult, token_tuple
from .sampling_flags import params_from

T = TypeVar("T")
Prompt = str | Sequence[int]
ENDPOINT_VARIABLE = "OUTRIDER_ENDPOINT"


def _find_endpoint(endpoint: str | None, port: int | None) -> str:
    if endpoint is not None:
        return endpoint
    if port is None and os.environ.get(ENDPOINT_VARIABLE):
        return os.environ[ENDPOINT_VARIABLE]
    found = find_server(port)
    if found is None:
        where = "" if port is None else f" on port {port}"
        raise ServerGone(
            f"no running `outrider serve` of this user was found{where}; start one, or give the "
            f"endpoint that it prints (or set {ENDPOINT_VARIABLE})"
        )
    return found.endpoint


class AsyncClient:
    """A connection to a server's SDK gateway, for asyncio.

    ``endpoint``: the address that ``outrider serve`` prints; if None, the latest server of this
    user, or the one on HTTP ``port``. ``token`` or ``curve`` as the server asks for them.
    ``timeout``: seconds a whole call may take unless it says otherwise; None waits for ever, but
    a server that died is noticed in any case. Connects on first use.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        port: int | None = None,
        token: str = "",
        curve: CurveKeys | None = None,
        timeout: float | None = None,
        connect_timeout: float = 5.0,
    ) -> None:
        self._endpoint = endpoint
        self._port = port
        self._token = token
        self._curve = curve
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._closed = False

    async def connect(self) -> Welcome:
        """Connect unless connected. Raises ServerGone, or RefusedError for a wrong token."""
        return (await self._connected()).welcome

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        rid: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        speculative: bool = True,
        timeout: float | None = None,
        **sampling: object,
    ) -> GenerationResult:
        """Generate for one prompt and wait for the end.

        Raises RefusedError for what the server will not do, RequestFailed, ServerGone, or
        TimeoutError, which aborts the request.
        """
        params = params_from(sampling, sampling_params)
        request = _request(prompt, params, rid, priority, cache_salt, speculative, False)
        async with asyncio.timeout(timeout or self._timeout):
            outputs = [Collector(i) for i in range(params.n)]
            async for chunk in self._chunks(request):
                tokens = token_tuple(chunk.tokens)
                outputs[chunk.index].add(
                    chunk.text,
                    tokens,
                    chunk.logprobs,
                    chunk.finish,
                    chunk.meta_info,
                    chunk.prompt_logprobs,
                )
        meta = outputs[0].meta
        return GenerationResult(
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            prompt_tokens=0 if meta is None else meta.prompt_tokens,
            outputs=tuple(output.completion() for output in outputs),
        )

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        rid: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        speculative: bool = True,
        **sampling: object,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield chunks as they come; leaving the loop early aborts the request."""
        params = params_from(sampling, sampling_params)
        request = _request(prompt, params, rid, priority, cache_salt, speculative, True)
        async for chunk in self._chunks(request):
            yield Chunk(
                text=chunk.text,
                token_ids=token_tuple(chunk.tokens),
                index=chunk.index,
                finish_reason=None if chunk.finish is None else chunk.finish.kind,
                meta_info=None if chunk.meta_info is None else chunk.meta_info.to_dict(),
                logprobs=chunk.logprobs,
                prompt_logprobs=chunk.prompt_logprobs,
            )

    async def abort(self, rid: str | None = None) -> None:
        """End the request ``rid`` of this client, or all of its requests."""
        connection = await self._connected()
        await connection.send(ClientAbort(rid or "", all_requests=rid is None))

    async def stats(self, timeout: float | None = None) -> CoreStats:
        """The core's gauges and counters."""
        reply = await self._call(ClientStats, timeout)
        assert isinstance(reply, StatsReply)
        return reply.stats

    async def server_info(self, timeout: float | None = None) -> dict[str, object]:
        """What ``/server_info`` shows."""
        return _json(await self._call(ClientInfo, timeout))

    async def flush_cache(self, timeout: float | None = None) -> None:
        """Empty the radix cache and the learned n-grams. Raises RefusedError unless idle."""
        await self._call(ClientFlush, timeout)

    async def close(self) -> None:
        """Say good-bye and disconnect; the server aborts what still runs. Idempotent."""
        self._closed = True
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _connected(self) -> Connection:
        if self._closed:
            raise ServerGone("this client is closed; make a new one")
        async with self._lock:
            if self._connection is None or self._connection.gone is not None:
                endpoint = _find_endpoint(self._endpoint, self._port)
                self._connection = await Connection.open(
                    endpoint, self._token, self._curve, self._connect_timeout
                )
            return self._connection

    async def _chunks(self, request: ClientGenerate) -> AsyncGenerator[TextChunk, None]:
        connection = await self._connected()
        queue = connection.open_request(request.rid)
        left = request.params.n
        try:
            await connection.send(request)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, ClientRefused):
                    left = 0
                    raise RefusedError(item.refused)
                if item.finish is not None:
                    left -= 1
                    _raise_failed(item)
                yield item
        finally:
            connection.close_request(request.rid)
            if left and connection.gone is None:
                await connection.send(ClientAbort(request.rid))

    async def _call(
        self,
        make: Callable[[int], ClientStats | ClientInfo | ClientFlush],
        timeout: float | None,
    ) -> StatsReply | JsonReply:
        connection = await self._connected()
        async with asyncio.timeout(timeout or self._timeout or 30.0):
            return await connection.call(make)


def _raise_failed(chunk: TextChunk) -> None:
    """An abort with an error status is an error; one that the client asked for is not."""
    finish = chunk.finish
    if finish is not None and finish.kind == "abort" and finish.status != 200:
        message = finish.message or "the request was aborted by the server"
        raise RequestFailed(message, finish.status)


def _request(
    prompt: Prompt,
    params: SamplingParams,
    rid: str | None,
    priority: int,
    cache_salt: str,
    speculative: bool,
    stream: bool,
) -> ClientGenerate:
    ids = b""
    if not isinstance(prompt, str):
        try:
            ids = np.asarray(list(prompt), dtype=np.int32).tobytes()
        except (TypeError, ValueError, OverflowError):
            raise RefusedError(Refused("prompt", "must be text or a list of token ids")) from None
    return ClientGenerate(
        rid=rid if rid is not None else uuid.uuid4().hex,
        text=prompt if isinstance(prompt, str) else None,
        token_ids=ids,
        params=params,
        stream=stream,
        priority=priority,
        cache_salt=cache_salt,
        speculative=speculative,
    )


def _json(reply: StatsReply | JsonReply) -> dict[str, object]:
    assert isinstance(reply, JsonReply)
    return msgspec.json.decode(reply.body, type=dict[str, object])


class Client:
    """The synchronous form of :class:`AsyncClient`; usable from several threads."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        port: int | None = None,
        token: str = "",
        curve: CurveKeys | None = None,
        timeout: float | None = None,
        connect_timeout: float = 5.0,
    ) -> None:
        self._loop = LoopThread("outrider-client")
        self._client = AsyncClient(
            endpoint,
            port=port,
            token=token,
            curve=curve,
            timeout=timeout,
            connect_timeout=connect_timeout,
        )

    def connect(self) -> Welcome:
        """Connect unless connected. Raises ServerGone, or RefusedError for a wrong token."""
        return self._run(self._client.connect())

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        rid: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        speculative: bool = True,
        timeout: float | None = None,
        **sampling: object,
    ) -> GenerationResult:
        """See :meth:`AsyncClient.generate`."""
        return self._run(
            self._client.generate(
                prompt,
                sampling_params,
                rid=rid,
                priority=priority,
                cache_salt=cache_salt,
                speculative=speculative,
                timeout=timeout,
                **sampling,
            )
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        rid: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        speculative: bool = True,
        **sampling: object,
    ) -> Iterator[Chunk]:
        """See :meth:`AsyncClient.stream`."""
        return self._loop.iterate(
            self._client.stream(
                prompt,
                sampling_params,
                rid=rid,
                priority=priority,
                cache_salt=cache_salt,
                speculative=speculative,
                **sampling,
            )
        )

    def abort(self, rid: str | None = None) -> None:
        """See :meth:`AsyncClient.abort`."""
        self._run(self._client.abort(rid))

    def stats(self, timeout: float | None = None) -> CoreStats:
        """The core's gauges and counters."""
        return self._run(self._client.stats(timeout))

    def server_info(self, timeout: float | None = None) -> dict[str, object]:
        """What ``/server_info`` shows."""
        return self._run(self._client.server_info(timeout))

    def flush_cache(self, timeout: float | None = None) -> None:
        """See :meth:`AsyncClient.flush_cache`."""
        self._run(self._client.flush_cache(timeout))

    def close(self) -> None:
        """Disconnect; idempotent."""
        if not self._loop.closed:
            self._loop.run(self._client.close())
            self._loop.close()

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return self._loop.run(work)
