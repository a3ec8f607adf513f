"""Rows of the served matrix about tool calls, and text with calls in it."""

import re

from served_answers import Ask
from served_asks import SCHEMA, chat, completion, native

from outrider.frontend.lossless.features import Known

_PUT = {"name": "put", "parameters": SCHEMA, "strict": True}
_TOOLS = [{"type": "function", "function": one} for one in (_PUT, {"name": "now"})]
_CHOSEN = {"type": "function", "function": {"name": "put"}}
_DRAWN = {"temperature": 0.9, "seed": 2}


def tools(known: Known) -> list[Ask]:
    """With what a template shows alone, and with calls that must be."""
    return [
        chat(0, tools=_TOOLS),
        chat(1, tools=_TOOLS, stream=True, **_DRAWN),
        chat(2, tools=_TOOLS, tool_choice="required"),
        chat(3, tools=_TOOLS, tool_choice=_CHOSEN, n=2, **_DRAWN),
    ]


def tool_choice(known: Known) -> list[Ask]:
    """Every kind of it."""
    return [
        chat(0, tools=_TOOLS, tool_choice="required"),
        chat(1, tools=_TOOLS, tool_choice="required", stream=True, **_DRAWN),
        chat(2, tools=_TOOLS, tool_choice=_CHOSEN, logprobs=True),
        chat(3, tools=_TOOLS, tool_choice=_CHOSEN, stream=True, **_DRAWN),
        chat(0, tools=_TOOLS, tool_choice="none"),
        chat(1, tools=_TOOLS, tool_choice="auto"),
    ]


def parallel(known: Known) -> list[Ask]:
    """One call at most: without the field there are more where the length allows."""
    one = {"tools": _TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False}
    return [
        chat(0, **one),
        chat(1, **one, stream=True, **_DRAWN),
        chat(2, **one, n=2, **_DRAWN),
        chat(3, **one, **_DRAWN | {"seed": 9}),
    ]


def structural_tags(known: Known) -> list[Ask]:
    """JSON behind a word that greedy decoding writes, and text around it."""
    asked = [{"structural_tag": _behind(known.text(output))} for output in known.greedy]
    return [
        native(0, asked[0]),
        native(1, {**asked[1], **_DRAWN}),
        completion(2, **asked[2], stream=True),
        completion(3, **asked[3], n=2, **_DRAWN),
    ]


def _behind(text: str) -> dict[str, object]:
    word = re.findall("[a-z]{2,}", text)[0]
    structure = {"begin": f"{word}: ", "schema": SCHEMA, "end": ";"}
    return {"triggers": [word], "structures": [structure]}
