"""Hermes and Qwen: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, one tag a call."""

from collections.abc import Collection
from typing import Final

from .call_object import call_object
from .reader import Reader, Steps

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
TAG: Final = (f'{BEGIN}\n{{"name": "', '", "arguments": ', f"}}\n{END}")


def hermes(reader: Reader, names: Collection[str]) -> Steps[None]:
    """Find calls anywhere in the text; the end tag may be missing."""
    while (yield from reader.text_until(BEGIN)):
        yield from reader.spaces()
        if (yield from call_object(reader, names)):
            yield from reader.spaces()
            if (yield from reader.literal(END)):
                reader.drop()
