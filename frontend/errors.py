"""Errors of the public Python APIs and of the command line, as users catch them."""

import re

import msgspec

from ..engine_core.refusal import Refused

_PLACE = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")


class OutriderError(RuntimeError):
    """Base class: the work could not be done; the message says why in a sentence."""


class LaunchError(OutriderError):
    """The engine core process could not be started."""


class LaunchRefused(LaunchError):
    """The engine core process read the model and refused a flag's value."""


class EngineDead(OutriderError):
    """The engine core ended while it was needed."""


class ServerGone(OutriderError):
    """The server that a client talks to vanished, or never answered."""


class EngineClosed(OutriderError):
    """Used after ``shutdown()`` or ``close()``."""


class RequestFailed(OutriderError):
    """A request ended with an error after it had been accepted. ``status``: as in HTTP."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


def refused_by(error: msgspec.DecodeError, fallback: str) -> Refused:
    """msgspec's "Expected `int`, got `str` - at `$.page_size`" with the field named first.

    ``fallback``: the field of a value that is wrong as a whole.
    """
    text = str(error)
    found = _PLACE.search(text)
    if found is None:
        return Refused(fallback, text)
    reason = text[: found.start()]
    return Refused(found["path"] or fallback, f"a key: {reason}" if found["key"] else reason)
