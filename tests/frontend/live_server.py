"""A real HTTP server over the fake core, in a thread of its own."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import httpx

from outrider.frontend.core_client import connect_core
from outrider.frontend.http import ServerState, create_app, serve_http
from outrider.frontend.service import AsyncService
from outrider.frontend.tokenizer import Tokenizer

from .fake_core import INFO, TOKEN, TOKENIZER, FakeCore

T = TypeVar("T")


class LiveServer:
    """``run`` executes coroutines in the server's event loop."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, state: ServerState) -> None:
        self.state = state
        self.tokenizer = tokenizer
        self.core: FakeCore
        self.service: AsyncService
        self.core_alive = True
        self.port = 0
        self.http: httpx.Client
        self._folder = folder
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(20)
        self.http = httpx.Client(base_url=self.url, timeout=20, verify=False)  # no TLS set-up

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self.join()

    def begin_stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self.http.close()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def run(self, work: Coroutine[object, object, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(20)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.core = FakeCore(self._folder)
        client, info = await connect_core(
            self.core.endpoint, TOKEN, alive=lambda: self.core_alive, timeout_s=10
        )
        self.service = AsyncService(client, self.tokenizer, info)
        app = create_app(self.service, self.state)

        def started(port: int) -> None:
            self.port = port
            self._started.set()

        await serve_http(
            app, "127.0.0.1", 0, drain_timeout=5.0, stop=self._stop, on_started=started
        )
        await client.close()
        await self.core.close()


@contextlib.contextmanager
def live_server(
    folder: Path, tokenizer: Tokenizer = TOKENIZER, state: ServerState | None = None
) -> Iterator[LiveServer]:
    """Run a server for the length of a ``with`` block."""
    server = LiveServer(folder, tokenizer, state or ServerState("pycoder"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def eventually(condition: Callable[[], bool], seconds: float = 1.0) -> bool:
    """Whether a condition becomes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def post(server: LiveServer, path: str, body: object) -> httpx.Response:
    """POST a JSON body."""
    return server.http.post(path, json=body)


__all__ = ["INFO", "LiveServer", "eventually", "live_server", "post"]
