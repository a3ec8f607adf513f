"""Llama 3: the answer is ``{"name": "f", "parameters": {...}}``, or several with ``;`` between."""

from collections.abc import Collection
from typing import Final

from .call_object import call_object
from .reader import Reader, Steps

MARKER: Final = "<|python_tag|>"


def llama3_json(reader: Reader, names: Collection[str]) -> Steps[None]:
    """Find calls at the beginning of the text, behind the marker, and behind another call."""
    yield from reader.spaces()
    due = (yield from reader.peek()) == "{"
    while due or (yield from reader.text_until(MARKER)):
        yield from reader.spaces()
        due = False
        if (yield from call_object(reader, names)):
            yield from reader.spaces()
            if (yield from reader.accept(";")):
                yield from reader.spaces()
            due = (yield from reader.peek()) == "{"
