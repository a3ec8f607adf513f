"""Private folders for the ipc endpoints of one engine's processes, locked while their maker lives.

A maker that was killed leaves its folder; the kernel gives the lock up, and the next one to come
removes what nobody holds. A process id would not do: another container's may look dead.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

MAX_IPC_PATH = 100  # a unix socket path holds 107 bytes on Linux; file names here are short
# Of folders made here alone: whatever else is called outrider-* is left as it is.
_PREFIX = "outrider-ipc-"
# Descriptors that hold the locks; closed by remove_private_dir or by the process's end.
_held: dict[Path, int] = {}


def make_private_dir() -> Path:
    """A new 0700 folder whose socket paths fit into an ipc address; its lock is this process's.

    Folders of dead makers beside it are removed.
    """
    base = _base()
    remove_dead_private_dirs()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # taken for a dead one's before it was opened
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # or before it was locked
            os.close(descriptor)
            continue
        except OSError:  # a file system without locks, where nobody can take it for dead either
            os.close(descriptor)
            return folder
        if folder.exists():
            _held[folder] = descriptor
            return folder
        os.close(descriptor)


def remove_private_dir(folder: Path) -> None:
    """Remove a folder with all that is in it, and give its lock up. Idempotent."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_dead_private_dirs() -> None:
    """Remove this user's folders whose makers are dead, as far as they hold sockets alone."""
    with contextlib.suppress(OSError):
        for folder in Path(_base()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    """Raises OSError for a folder that is held, or is not one of ours."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        entries = list(folder.iterdir())
        if all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in entries):
            for entry in entries:
                entry.unlink(missing_ok=True)
            folder.rmdir()
    finally:
        os.close(descriptor)


def _base() -> str:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if not os.access(base, os.W_OK) or len(base) > MAX_IPC_PATH - 30:
        return "/tmp"
    return base
