"""Private folders for the ipc endpoints of one engine's processes."""

import os
import tempfile
from pathlib import Path

MAX_IPC_PATH = 100  # a unix socket path holds 107 bytes on Linux; file names here are short


def make_private_dir() -> Path:
    """A new 0700 folder whose socket paths fit into an ipc address."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if not os.access(base, os.W_OK) or len(base) > MAX_IPC_PATH - 30:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix="outrider-", dir=base))
