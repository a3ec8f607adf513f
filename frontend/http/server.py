"""Running the application with uvicorn, and draining it on SIGTERM."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from .state import ServerState

DRAIN_POLL_S = 0.05
CUT_OFF = "the server shut down before the request had finished (--drain-timeout)"
CLOSE_TIMEOUT_S = 2  # for answers still being written once every request has ended


class _DrainingServer(uvicorn.Server):
    """Keeps answering while requests finish; the first signal drains, the second one ends."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal; the drain itself runs in the event loop."""
        if self._stop.is_set():
            self.should_exit = self.force_exit = True
        self._loop.call_soon_threadsafe(self._stop.set)


async def serve_http(
    app: Starlette,
    host: str,
    port: int,
    *,
    drain_timeout: float = 30.0,
    stop: asyncio.Event | None = None,
    on_started: Callable[[int], None] | None = None,
    log_level: str = "warning",
) -> None:
    """Serve until SIGTERM, SIGINT or ``stop``, then drain: new requests get 503, open ones have
    ``drain_timeout`` seconds, and what is left is aborted.

    ``port`` 0 takes a free one; ``on_started`` is called with the port. Raises OSError when the
    address cannot be bound.
    """
    state: ServerState = app.state.server
    stop = stop or asyncio.Event()
    listener = bind(host, port)
    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    server = _DrainingServer(config, stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started and on_started is not None:
            on_started(listener.getsockname()[1])
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await _drain(state, server, drain_timeout)
        server.should_exit = True
        await serving
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError when the address is taken or unknown."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is spelled out
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


async def _drain(state: ServerState, server: uvicorn.Server, timeout_s: float) -> None:
    state.phase = "draining"
    deadline = time.monotonic() + timeout_s
    service = state.service
    while service is not None and service.open_requests and not server.force_exit:
        if time.monotonic() > deadline or service.core.dead.is_set():
            service.end_all(CUT_OFF)
            break
        await asyncio.sleep(DRAIN_POLL_S)
    else:
        return
    # The ends of what was cut off still have to reach the clients.
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while service.open_requests and time.monotonic() < deadline and not server.force_exit:
        await asyncio.sleep(DRAIN_POLL_S)
    if service.open_requests:  # the core does not answer
        service.core.fail_all(CUT_OFF)
        await asyncio.sleep(DRAIN_POLL_S)
