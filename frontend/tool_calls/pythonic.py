"""Pythonic calls, ``[f(a=1), g(b="x")]``: the answer is a list of them (Llama 3.2 and 4)."""

import ast
import json
import re
import warnings
from collections.abc import Collection
from typing import Final

from .reader import Reader, Steps

BEGIN: Final = "<|python_start|>"
END: Final = "<|python_end|>"
_NAME: Final = re.compile("[A-Za-z0-9_.-]*")
# Of arguments outside strings and brackets: a plus sign in exponents alone.
_PLAIN: Final = re.compile(r"(?:[\w\s.,:=-]|(?<=[eE])\+)*")
_CLOSER: Final = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH: Final = 100
_NAMED: Final = {"true": True, "false": False, "null": None}  # as JSON would write them


def pythonic(reader: Reader, names: Collection[str]) -> Steps[None]:
    """Find a list of calls at the beginning of the text and behind the marker.

    A call is given out when its bracket closes: its arguments become JSON as a whole.
    """
    yield from reader.spaces()
    due = (yield from reader.peek()) == "["
    while due or (yield from reader.text_until(BEGIN)):
        due = False
        yield from reader.spaces()
        if (yield from reader.accept("[")) and (yield from _calls(reader, names)):
            yield from reader.spaces()
            if (yield from reader.literal(END)):
                reader.drop()


def _calls(reader: Reader, names: Collection[str]) -> Steps[bool]:
    """Read what follows the bracket of a list, and its end."""
    while True:
        yield from reader.spaces()
        start = reader.held
        yield from reader.run(_NAME)
        name = reader.pending(start)
        start = reader.held
        if reader.full or name not in names or not (yield from _bracket(reader)):
            return False
        arguments = _as_json(reader.pending(start))
        if arguments is None:
            return False
        reader.begin(name)
        reader.give_arguments(arguments)
        yield from reader.spaces()
        if (yield from reader.accept("]")):
            reader.drop()
            return True
        if not (yield from reader.accept(",")):
            return False


def _bracket(reader: Reader) -> Steps[bool]:
    """Read from an opening bracket to the one that closes it, whatever Python stands between."""
    if not (yield from reader.accept("(")):
        return False
    closers = [")"]
    while closers:
        yield from reader.run(_PLAIN)
        opened = yield from reader.accept("([{")
        if opened and len(closers) < _MAX_DEPTH:
            closers.append(_CLOSER[opened])
        elif (yield from reader.accept(closers[-1])):
            closers.pop()
        elif opened or not (yield from _string(reader)):
            return False
    return True


def _string(reader: Reader) -> Steps[bool]:
    """Read a string in quotes of either kind, one of each or three."""
    quote = yield from reader.accept("'\"")
    if not quote:
        return False
    if (yield from reader.accept(quote)):
        if not (yield from reader.accept(quote)):
            return True  # an empty one
        quote *= 3
    inside = re.compile(rf"[^{quote[0]}\\]*")
    closed = 0
    while closed < len(quote):
        if not closed:
            yield from reader.run(inside)
        if (yield from reader.accept(quote[0])):
            closed += 1
            continue
        closed = 0
        if (yield from reader.accept("\\")):
            if not (yield from reader.peek()):
                return False
            reader.skip()
        elif not (yield from reader.peek()):
            return False
    return True


def _as_json(arguments: str) -> str | None:
    """``(a=1, b=None)`` as ``{"a":1,"b":null}``; None for what is no list of such literals."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of a backslash that escapes nothing
            call = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values: dict[str, object] = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in values:
                return None
            values[keyword.arg] = _literal(keyword.value)
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair is no text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return text


def _literal(node: ast.expr) -> object:
    """The value of a literal that JSON has, too. Raises ValueError."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMED:
            return _NAMED[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _literal(value) for key, value in pairs}
    raise ValueError(ast.dump(node)[:60])


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key of JSON is a string")
