"""The process of one rank as rank 0 holds it: a line to it that tells both sides of a death."""

import contextlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Sequence

_READ = 4096


class RankChild:
    """A rank's process. Its standard input is a socket: the rank sends back what it reads there,
    from a thread that does nothing else, and takes the end of it as the end of rank 0.
    """

    def __init__(self, rank: int, command: Sequence[str], launch: bytes) -> None:
        """Start ``command`` and give it its launch line. Raises OSError."""
        self.rank = rank
        self._line, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=2,
                    start_new_session=True,
                    env=os.environ | {"PYTHONUNBUFFERED": "1"},
                )
        except BaseException:
            self._line.close()
            raise
        with contextlib.suppress(OSError):  # its end is reported with its status
            self._line.sendall(launch)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit status (negative: a signal); None if it still runs after ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(None if seconds is None else max(0.0, seconds))
        return None

    def kill(self) -> None:
        """SIGKILL, which ends a stopped process too."""
        self._process.kill()

    def close(self) -> None:
        """Let go of the line; the rank, if it runs, ends."""
        self._line.close()

    def ask(self) -> None:
        """Ask for a sign of life; what came late for an earlier question is dropped."""
        with contextlib.suppress(OSError):
            while self._line.recv(_READ, socket.MSG_DONTWAIT):
                pass
        with contextlib.suppress(OSError):
            self._line.send(b"?", socket.MSG_DONTWAIT)

    def fileno(self) -> int:
        """What ``select`` waits on: readable by a sign of life, or at the process's end."""
        return self._line.fileno()


def silent(children: Sequence[RankChild], seconds: float) -> list[RankChild]:
    """Those that show no sign of life within ``seconds``; one that has ended is not silent."""
    for child in children:
        child.ask()
    waiting = list(children)
    deadline = time.monotonic() + seconds
    while waiting:
        answered, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
        if not answered:
            break
        waiting = [child for child in waiting if child not in answered]
    return waiting
