"""Wakes the engine's loop out of its poll, from threads and signal handlers."""

import contextlib
import os


class Wakeup:
    """A pipe that never blocks: one byte in it means that somebody wants attention."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """The end to poll for reading."""
        return self._read

    def wake(self) -> None:
        """Make the poll return; safe in any thread and in a signal handler."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
