"""JSON, checked character by character as it comes; what was read is left pending.

Libraries that parse partial JSON give values, and read everything again for each part; here the
text itself is passed on, as the model wrote it, so only its end has to be found.
"""

import re
from typing import Final

from .reader import Reader, Steps

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS: Final = re.compile("[0-9]*")
_HEX: Final = "0123456789abcdefABCDEF"
_CLOSER: Final = {"{": "}", "[": "]"}
_WORDS: Final = {"t": "true", "f": "false", "n": "null"}


def json_value(reader: Reader) -> Steps[bool]:
    """Read one value (RFC 8259); False at the first character that no value has there."""
    closers: list[str] = []
    while True:
        opened = yield from reader.accept("{[")
        if opened:
            closer = _CLOSER[opened]
            yield from reader.spaces()
            if not (yield from reader.accept(closer)):
                closers.append(closer)
                if closer == "}" and not (yield from _key(reader)):
                    return False
                continue
        elif not (yield from json_scalar(reader)):
            return False
        while closers:  # a value has ended
            yield from reader.spaces()
            if (yield from reader.accept(closers[-1])):
                closers.pop()
                continue
            if not (yield from reader.accept(",")):
                return False
            yield from reader.spaces()
            if closers[-1] == "}" and not (yield from _key(reader)):
                return False
            break
        else:
            return True


def json_scalar(reader: Reader) -> Steps[bool]:
    """Read a string, a number, true, false or null; False at the first wrong character."""
    first = yield from reader.peek()
    if first == '"':
        return (yield from json_string(reader))
    if first in _WORDS:
        return (yield from reader.literal(_WORDS[first]))
    return (yield from _number(reader))


def json_string(reader: Reader) -> Steps[bool]:
    """Read a string with its quotes; False at the first character that cannot stand there."""
    if not (yield from reader.accept('"')):
        return False
    while True:
        yield from reader.run(_PLAIN)
        if (yield from reader.accept('"')):
            return True
        if not (yield from reader.accept("\\")):
            return False
        escaped = yield from reader.accept('"\\/bfnrtu')
        if not escaped:
            return False
        for _ in range(4 if escaped == "u" else 0):
            if not (yield from reader.accept(_HEX)):
                return False


def _key(reader: Reader) -> Steps[bool]:
    """Read a key, its colon and the white space up to the value."""
    if not (yield from json_string(reader)):
        return False
    return (yield from colon(reader))


def colon(reader: Reader) -> Steps[bool]:
    """Read a colon and the white space around it."""
    yield from reader.spaces()
    if not (yield from reader.accept(":")):
        return False
    yield from reader.spaces()
    return True


def _number(reader: Reader) -> Steps[bool]:
    yield from reader.accept("-")
    if not (yield from reader.accept("0")) and not (yield from _digits(reader)):
        return False
    if (yield from reader.accept(".")) and not (yield from _digits(reader)):
        return False
    if (yield from reader.accept("eE")):
        yield from reader.accept("+-")
        return (yield from _digits(reader))
    return True


def _digits(reader: Reader) -> Steps[bool]:
    """Read one digit or more."""
    if not (yield from reader.accept("0123456789")):
        return False
    yield from reader.run(_DIGITS)
    return True
