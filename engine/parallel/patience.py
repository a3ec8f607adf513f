"""How long ranks wait for each other, and the thread that looks after a call that takes long."""

import math
import os
import threading
import time
from collections.abc import Callable

from ...engine_core.refusal import Refused, RefusedError

TIMEOUT_VARIABLE = "OUTRIDER_RANK_TIMEOUT"  # seconds; tests have less patience
_TIMEOUT_S = 60.0
_ANSWER_SHARE = 0.25


def rank_timeout_s() -> float:
    """Seconds after which a rank that does not come to a sum is as good as dead.

    Raises RefusedError.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, str(_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        reason = f"must be a number of seconds above 0, got {text!r}; unset it for {_TIMEOUT_S:g}"
        raise RefusedError(Refused(TIMEOUT_VARIABLE, reason))
    return seconds


class Vigil:
    """Asks whether all is well while a call goes on: at half of ``timeout_s``, and again and again.

    ``ask(wait_s)`` runs in a thread of its own, with a quarter of ``timeout_s`` for an answer, so
    that whoever hangs is known before any rank gives up a sum.
    """

    def __init__(self, timeout_s: float, ask: Callable[[float], object]) -> None:
        self._every_s = timeout_s / 2
        self._wait_s = timeout_s * _ANSWER_SHARE
        self._ask = ask
        self._since: float | None = None
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="outrider-vigil", daemon=True).start()

    @property
    def calling(self) -> bool:
        """Whether a call goes on."""
        return self._since is not None

    def begin(self) -> None:
        """A call begins."""
        self._since = time.monotonic()

    def done(self) -> None:
        """It has ended."""
        self._since = None

    def close(self) -> None:
        """Ask no more."""
        self._over.set()

    def _watch(self) -> None:
        asked = -math.inf
        while not self._over.wait(self._every_s / 10):
            since, now = self._since, time.monotonic()
            if since is not None and now - max(since, asked) >= self._every_s:
                self._ask(self._wait_s)
                asked = time.monotonic()
