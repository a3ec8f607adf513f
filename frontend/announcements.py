"""Where a served engine announces its SDK endpoint."""

import os
import stat
import tempfile
from pathlib import Path

import msgspec

from ..engine_core.private_dir import remove_dead_private_dirs


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a server writes for SDK clients of the same user: where its gateway listens."""

    endpoint: str
    pid: int
    port: int
    model: str
    curve_server_key: str = ""


def announcement_dir() -> Path:
    """The user's folder of announcements, created 0700; refuses one that others could write.

    Raises PermissionError when the folder belongs to somebody else or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"outrider-servers-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of this user with mode 0700; remove it or set "
            "XDG_RUNTIME_DIR to a private folder"
        )
    return folder


def announce(announcement: Announcement) -> Path:
    """Write an announcement where ``find_server`` looks; returns the file, to remove at exit."""
    path = announcement_dir() / f"{announcement.port}-{announcement.pid}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(announcement))
    temporary.replace(path)
    return path


def find_server(port: int | None = None) -> Announcement | None:
    """The latest running server of this user, or the one on HTTP port ``port``.

    What dead servers left behind is removed.
    """
    remove_dead_private_dirs()
    try:
        files = sorted(announcement_dir().glob("*.json"), key=_modified, reverse=True)
    except OSError:
        return None
    for path in files:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Announcement)
        except (OSError, msgspec.MsgspecError):
            continue
        if not _alive(found.pid):
            path.unlink(missing_ok=True)
        elif port is None or found.port == port:
            return found
    return None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
