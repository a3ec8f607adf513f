"""Grammars that no request had lately, compiled in a thread: the engine's loop does not wait."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from ..engine_core.grammar_compiler import GrammarCompiler
from ..engine_core.grammar_spec import GrammarSpec
from ..engine_core.messages import FinishReason, GenerateRequest, RequestOutput, RequestStats


class Waiting(NamedTuple):
    """A request whose grammar is compiled: who asked (an opaque client identity), and for what."""

    client: bytes
    message: GenerateRequest


class GrammarLoader:
    """Holds requests back until their grammars are compiled, well or not: the core says which.

    ``wake`` is called from the thread after each.
    """

    def __init__(self, compiler: GrammarCompiler, wake: Callable[[], None]) -> None:
        self._compiler = compiler
        self._wake = wake
        self._waiting: dict[str, Waiting] = {}
        self._asked: SimpleQueue[tuple[str, GrammarSpec]] = SimpleQueue()
        self._done: SimpleQueue[str] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._waiting)

    def hold(self, client: bytes, message: GenerateRequest) -> bool:
        """Take a request whose grammar is not known; False for all others."""
        spec = message.params.grammar
        if spec is None or self._compiler.knows(spec):
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="grammars", daemon=True)
            self._thread.start()
        self._waiting[message.rid] = Waiting(client, message)
        self._asked.put((message.rid, spec))
        return True

    def drop(self, rid: str) -> RequestOutput | None:
        """Forget a request that waits: its end. None if it does not wait."""
        waiting = self._waiting.pop(rid, None)
        if waiting is None:
            return None
        prompt = len(waiting.message.prompt) // 4
        finish = FinishReason("abort", message="aborted by the client")
        stats = RequestStats(prompt, 0, 0, 0, 0, 0, 0, 0, 0, (), None)
        return RequestOutput(rid, b"", (), finish, stats)

    def finished(self) -> list[Waiting]:
        """The requests that need not wait any longer."""
        found: list[Waiting] = []
        while not self._done.empty():
            waiting = self._waiting.pop(self._done.get(), None)
            if waiting is not None:
                found.append(waiting)
        return found

    def _loop(self) -> None:
        while True:
            rid, spec = self._asked.get()
            self._compiler.refuse(spec)
            self._done.put(rid)
            self._wake()
