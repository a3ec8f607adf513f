"""What ``outrider doctor`` asks of the process that reads a draft's weights, and the answer."""

import msgspec

from .config import EngineConfig
from .draft_finding import Finding


class DraftInspection(msgspec.Struct, frozen=True, kw_only=True):
    """What reading found; ``message`` is set instead where a flag's value cannot be used.

    ``draft_tokens``: the target's ids that the draft can propose; None where it can propose all.
    """

    findings: tuple[Finding, ...] = ()
    draft_tokens: tuple[int, ...] | None = None
    field: str = ""
    message: str = ""


def encode_line(message: msgspec.Struct) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def decode_config(line: bytes) -> EngineConfig:
    """Raises msgspec.MsgspecError."""
    return msgspec.json.decode(line, type=EngineConfig)


def decode_inspection(line: bytes) -> DraftInspection:
    """Raises msgspec.MsgspecError."""
    return msgspec.json.decode(line, type=DraftInspection)
