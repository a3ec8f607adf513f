"""Where a command writes its JSON: a file that was looked at before the work began, or ``-``."""

import os
import sys
from pathlib import Path

import msgspec

from .flags import UsageError


class JsonFile:
    """The target of ``--json FILE``; ``-`` is standard output, where no table is printed then.

    Raises UsageError, naming ``flag``, for a file that could not be written.
    """

    def __init__(self, flag: str, path: str | None) -> None:
        self._path = path
        if path is not None and path != "-":
            reason = _unwritable(Path(path))
            if reason is not None:
                raise UsageError(f"{flag}: cannot write {path!r}: {reason}")

    def write(self, value: object) -> None:
        """Write ``value``, if a file was named. Raises OSError."""
        if self._path is None:
            return
        data = msgspec.json.format(msgspec.json.encode(value)) + b"\n"
        if self._path == "-":
            sys.stdout.write(data.decode())
            sys.stdout.flush()
        else:
            Path(self._path).write_bytes(data)

    def write_beside(self, value: object, table: str) -> None:
        """Write ``value`` and print ``table``, whether or not the file can still be written."""
        try:
            self.write(value)
        finally:
            print(table, file=sys.stderr if self._path == "-" else sys.stdout, flush=True)


def _unwritable(path: Path) -> str | None:
    """Why ``path`` cannot be written, as far as can be said without opening it."""
    if path.is_dir():
        return "it is a folder"
    if path.exists():
        return None if os.access(path, os.W_OK) else "it may not be written"
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {str(folder)!r} does not exist"
    return None if os.access(folder, os.W_OK | os.X_OK) else "its folder may not be written"
