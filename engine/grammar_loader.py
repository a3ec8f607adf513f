"""Grammars that no request had lately, compiled in a thread: the engine's loop does not wait."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

from ..engine_core.grammar_compiler import GrammarCompiler
from ..engine_core.grammar_spec import GrammarSpec
from ..engine_core.messages import FinishReason, GenerateRequest, RequestOutput, RequestStats


class Waiting(NamedTuple):
    """A request whose grammar is compiled: who asked (an opaque client identity), and for what."""

    client: bytes
    message: GenerateRequest
    spec: GrammarSpec


class GrammarLoader:
    """Holds requests back until their grammars are compiled, well or not: the core says which.

    ``wake`` is called from the thread after each.
    """

    def __init__(self, compiler: GrammarCompiler, wake: Callable[[], None]) -> None:
        self._compiler = compiler
        self._wake = wake
        self._waiting: dict[str, Waiting] = {}
        self._asked: SimpleQueue[Waiting] = SimpleQueue()
        self._done: SimpleQueue[Waiting] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def waits(self, message: GenerateRequest) -> bool:
        """Whether a request has a grammar that is not known."""
        spec = message.params.grammar
        return spec is not None and not self._compiler.knows(spec)

    def hold(self, client: bytes, message: GenerateRequest) -> None:
        """Take a request that ``waits``."""
        spec = message.params.grammar
        assert spec is not None, "only requests with a grammar wait"
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="grammars", daemon=True)
            self._thread.start()
        waiting = self._waiting[message.rid] = Waiting(client, message, spec)
        self._asked.put(waiting)

    def drop(self, rid: str) -> RequestOutput | None:
        """Forget a request that waits: its end. None if it does not wait."""
        waiting = self._waiting.pop(rid, None)
        if waiting is None:
            return None
        prompt = len(waiting.message.prompt) // 4
        finish = FinishReason("abort", message="aborted by the client")
        stats = RequestStats(prompt, 0, 0, 0, 0, 0, 0, 0, 0, (), None)
        return RequestOutput(rid, b"", (), finish, stats)

    def finished(self) -> Iterator[Waiting]:
        """The requests that need not wait any longer; each one's grammar is kept until the next."""
        while not self._done.empty():
            waiting = self._done.get()
            if self._waits_still(waiting):
                del self._waiting[waiting.message.rid]
                yield waiting
            self._compiler.release(waiting.spec)

    def _waits_still(self, waiting: Waiting) -> bool:
        """Another request may have taken the id of one that was dropped."""
        return self._waiting.get(waiting.message.rid) is waiting

    def _loop(self) -> None:
        while True:
            waiting = self._asked.get()
            if self._waits_still(waiting):
                self._compiler.hold(waiting.spec)
                self._done.put(waiting)
                self._wake()
