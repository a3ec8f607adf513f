"""Calls whose form a grammar forces: the arguments of a named function, or an array of calls."""

from collections.abc import Collection
from typing import Final

from .call_object import arguments, call_array
from .reader import Reader, Steps

_NEVER: Final = "\0"  # JSON escapes it


def named_call(reader: Reader, names: Collection[str]) -> Steps[None]:
    """The text is the arguments of the only one of ``names``."""
    [name] = names
    yield from arguments(reader, name)
    yield from _rest(reader)


def required_calls(reader: Reader, names: Collection[str]) -> Steps[None]:
    """The text is a JSON array of calls."""
    if (yield from reader.accept("[")):
        yield from call_array(reader, names)
    yield from _rest(reader)


def _rest(reader: Reader) -> Steps[None]:
    """What else there is, where a stop or the length limit cut the text, is text."""
    while (yield from reader.text_until(_NEVER)):
        continue
