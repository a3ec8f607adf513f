"""Ctrl-C and SIGTERM while training: the step is finished and the state saved."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_NOTE = b"\nstopping after this step; interrupt once more to stop at once, without saving\n"


class Interruption:
    """While entered, the first SIGINT or SIGTERM sets ``asked``; a second one acts as before.

    Signals reach the main thread only: in another one nothing is watched. A signal that was
    ignored, as by nohup, stays so. Of several processes rank 0 decides, and alone ``tells`` it.
    """

    def __init__(self, tells: bool = True) -> None:
        self.asked = False
        self._tells = tells
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()
        # Not by sys.stderr, in the middle of whose writing this may be.
        if self._tells:
            os.write(2, _NOTE)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
