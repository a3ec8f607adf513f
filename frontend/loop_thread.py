"""One asyncio loop in a thread, driven by synchronous callers: the async code is written once."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from typing import TypeVar

from .errors import EngineClosed

T = TypeVar("T")
CLOSE_TIMEOUT_S = 10.0


class LoopThread:
    """A running event loop; ``run`` and ``iterate`` may be called from any other thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._thread.is_alive() or self._loop.is_closed()

    def run(self, work: Coroutine[object, object, T], timeout_s: float | None = None) -> T:
        """Run a coroutine to its end and return its result. Raises TimeoutError."""
        return self._wait(self._submit(work), timeout_s)

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield what an async generator yields; leaving early closes the generator."""
        try:
            while True:
                try:
                    item = self._wait(self._submit(_next(items)), None)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if not self.closed:
                self._close_generator(items)

    def _close_generator(self, items: AsyncGenerator[T, None]) -> None:
        with contextlib.suppress(EngineClosed):
            if threading.current_thread() is self._thread:
                self._submit(_close(items))  # the garbage collector ran here: it cannot wait
            else:
                self.run(_close(items), CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Cancel what runs and stop the loop; idempotent."""
        if self.closed:
            return
        with contextlib.suppress(TimeoutError):
            self.run(_cancel_others(), CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _submit(self, work: Coroutine[object, object, T]) -> "Future[T]":
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise EngineClosed("this object was shut down; make a new one") from None

    def _wait(self, future: "Future[T]", timeout_s: float | None) -> T:
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the coroutine's own TimeoutError
                raise
            future.cancel()
            raise TimeoutError(f"not done within {timeout_s:g} s") from None
        except KeyboardInterrupt:
            future.cancel()
            raise


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _close(items: AsyncGenerator[T, None]) -> None:
    await items.aclose()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
