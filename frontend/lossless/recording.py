"""The trace of a check: recorded from its first step on, kept if anything failed."""

import contextlib
import os
import tempfile
from pathlib import Path

from ...engine_core.trace import TRACE_VARIABLE
from ..flags import UsageError


class Recording:
    """A file for a trace in ``folder``, or in a temporary one that is gone unless it is kept.

    Raises UsageError for a folder that cannot be made, and if another trace is asked for.
    """

    def __init__(self, folder: str | None) -> None:
        if os.environ.get(TRACE_VARIABLE):
            raise UsageError(f"{TRACE_VARIABLE}: the check records a trace itself; give --traces")
        self._temporary = folder is None
        try:
            place = Path(folder or tempfile.mkdtemp(prefix="outrider-traces-")).expanduser()
            place.mkdir(parents=True, exist_ok=True)
            self.path = _free(place.absolute())
        except OSError as error:
            raise UsageError(f"--traces: cannot write to {folder!r}: {error.strerror}") from None

    def drop(self) -> None:
        """Remove the trace."""
        self.path.unlink(missing_ok=True)
        if self._temporary:
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()


def _free(folder: Path) -> Path:
    """A new file, so that no trace of an earlier check is lost."""
    number = 1
    while True:
        path = folder / f"lossless-{number}.trace"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return path
