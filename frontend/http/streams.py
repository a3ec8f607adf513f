"""Server-sent events, and work that ends when its client leaves."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...engine_core.refusal import RefusedError
from .errors import as_http_error, error_body

T = TypeVar("T")
_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Run ``work``, or cancel it and raise ClientDisconnect when the client leaves first."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(value: object) -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(Response):
    """Sends events as they come; the generator is closed when it ends or the client leaves.

    An error after the headers becomes an error event; every stream ends with ``[DONE]``.
    """

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.body = b""
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        with contextlib.suppress(ClientDisconnect, OSError):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self._events):
            try:
                async for part in self._events:
                    await _send_part(send, part)
            except Exception as error:
                http = as_http_error(error)
                body = error_body(http.status, http.message, param=http.param, code=http.code)
                if http is not error and not isinstance(error, RefusedError):
                    _log.exception("a stream failed")
                await _send_part(send, event(body))
        await _send_part(send, DONE, last=True)


async def _send_part(send: Send, body: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})


async def stream_response(request: Request, events: AsyncGenerator[bytes]) -> EventStream:
    """Wait for the first event, so that an early failure still gets its own HTTP status."""
    try:
        first = await until_disconnect(request.receive, _next(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(_chain(first, events))


async def _next(events: AsyncGenerator[bytes]) -> bytes | None:
    return await anext(events, None)


async def _chain(first: bytes | None, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with contextlib.aclosing(rest):
        if first is not None:
            yield first
        async for part in rest:
            yield part
