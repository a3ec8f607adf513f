"""The first line a core process reads on its standard input, and the one it prints when up.

The parent keeps standard input open: its end means that the parent is gone, and the core stops.
"""

from typing import Literal

import msgspec

from .config import EngineConfig
from .messages import CoreInfo


class CoreLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a core process runs and where it listens. ``endpoint``: a ZeroMQ ROUTER address that
    the core binds; ``token``: what ``Hello`` must carry.
    """

    config: EngineConfig
    endpoint: str
    token: str


class CoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The core's one line of standard output: ready to be greeted, or why it could not start.

    ``field`` names the setting at fault when one is known; ``info`` comes with ``ready``.
    """

    status: Literal["ready", "error"]
    message: str = ""
    field: str = ""
    info: CoreInfo | None = None


def encode_line(message: CoreLaunch | CoreStatus) -> bytes:
    """One JSON line, newline included."""
    return msgspec.json.encode(message) + b"\n"


def decode_launch(line: bytes) -> CoreLaunch:
    """Read the parent's line. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(line, type=CoreLaunch)


def decode_status(line: bytes) -> CoreStatus:
    """Read the core's line. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(line, type=CoreStatus)
