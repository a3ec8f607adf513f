"""What one check of a draft found, and what to do about it."""

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "failed"]


class Finding(msgspec.Struct, frozen=True):
    """One check. ``remedy`` is empty where there is nothing to do."""

    check: str
    level: Level
    found: str
    remedy: str = ""


def failed(check: str, reason: str) -> Finding:
    """A failed check from a refusal's sentence, whose remedy stands behind a semicolon."""
    found, _, remedy = reason.partition("; ")
    return Finding(check, "failed", found, remedy)
