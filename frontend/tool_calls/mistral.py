"""Mistral: ``[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`` and ``[TOOL_CALLS]f{...}``."""

import re
from collections.abc import Collection
from typing import Final

from .call_object import arguments, call_array
from .reader import Reader, Steps

MARKER: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"  # between name and arguments, from the thirteenth tokenizer on
TAG: Final = (f'{MARKER} [{{"name": "', '", "arguments": ', "}]")
_NAME: Final = re.compile("[A-Za-z0-9_.-]*")


def mistral(reader: Reader, names: Collection[str]) -> Steps[None]:
    """Find calls behind each marker."""
    while (yield from reader.text_until(MARKER)):
        yield from reader.spaces()
        if (yield from reader.accept("[")):
            yield from call_array(reader, names)
            continue
        start = reader.held
        yield from reader.run(_NAME)
        name = reader.pending(start)
        if name not in names:
            continue
        if (yield from reader.peek()) == "[" and not (yield from reader.literal(ARGUMENTS)):
            continue
        yield from reader.spaces()
        yield from arguments(reader, name)
