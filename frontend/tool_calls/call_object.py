"""A call as a JSON object: ``{"name": "f", "arguments": {...}}``, ``parameters`` for the latter."""

from collections.abc import Collection
from typing import Final

import msgspec

from .json_text import colon, json_scalar, json_string, json_value
from .reader import Reader, Steps

_ARGUMENTS: Final = ("arguments", "parameters")
_PASSED_OVER: Final = ("type", "id")  # Llama's and Mistral's


def call_object(reader: Reader, names: Collection[str]) -> Steps[bool]:
    """Read a call of one of ``names`` and give it out; False where it stops being one.

    The call begins once its name and the brace of its arguments are known; from there on its
    arguments are given out as they come. Whatever came before is left pending if there is none.
    """
    if reader.full or not (yield from reader.accept("{")):
        return False
    name: str | None = None
    early: str | None = None  # arguments in front of the name
    begun = False
    while True:
        yield from reader.spaces()
        key = yield from _text(reader)
        if key is None or not (yield from colon(reader)):
            return False
        if key == "name" and name is None:
            name = yield from _text(reader)
            if name not in names:
                return False
        elif key in _ARGUMENTS and not begun and early is None:
            if name is not None:
                begun = True
                if not (yield from arguments(reader, name)):
                    return False
            else:
                early = yield from _object(reader)
                if early is None:
                    return False
        elif key not in _PASSED_OVER or not (yield from json_scalar(reader)):
            return False
        if name is not None and early is not None and not begun:
            begun = True
            reader.begin(name)
            reader.give_arguments(early)
        yield from reader.spaces()
        if (yield from reader.accept("}")):
            break
        if not (yield from reader.accept(",")):
            return False
    if name is None:
        return False
    if not begun:
        reader.begin(name)
        reader.give_arguments("{}")
    reader.drop()
    return True


def call_array(reader: Reader, names: Collection[str]) -> Steps[bool]:
    """Read what follows the bracket of an array of calls, and its end."""
    while True:
        yield from reader.spaces()
        if not (yield from call_object(reader, names)):
            return False
        yield from reader.spaces()
        if (yield from reader.accept("]")):
            reader.drop()
            return True
        if not (yield from reader.accept(",")):
            return False


def arguments(reader: Reader, name: str) -> Steps[bool]:
    """Begin a call if an object follows, and give that out while it comes."""
    if reader.full or (yield from reader.peek()) != "{":
        return False
    reader.begin(name)
    reader.stream_arguments(True)
    whole = yield from json_value(reader)
    reader.stream_arguments(False)
    reader.cut = not whole and reader.exhausted
    return whole


def _object(reader: Reader) -> Steps[str | None]:
    """Read an object and return its text."""
    if (yield from reader.peek()) != "{":
        return None
    start = reader.held
    return reader.pending(start) if (yield from json_value(reader)) else None


def _text(reader: Reader) -> Steps[str | None]:
    """Read a string and return what it says."""
    start = reader.held
    if not (yield from json_string(reader)):
        return None
    try:
        return msgspec.json.decode(reader.pending(start), type=str)
    except msgspec.DecodeError:  # half a surrogate pair
        return None
