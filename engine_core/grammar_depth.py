"""How deep a JSON Schema may nest once its references are followed."""

from collections.abc import Iterator
from urllib.parse import unquote


def schema_depth(schema: object) -> int:
    """An upper bound on nested objects and arrays, each referenced schema followed once.

    ``schema``: decoded JSON. A reference that is no pointer counts as the whole document.
    """
    whole = _depth(schema)
    references = {ref for ref in _references(schema) if ref != "#"}
    return whole + sum(_target_depth(schema, ref, whole) for ref in references)


def _depth(value: object) -> int:
    level, depth = [value], 0
    while level := [child for one in level for child in _children(one)]:
        depth += 1
    return depth


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _references(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and isinstance(ref := one.get("$ref"), str):
            yield ref
        waiting += _children(one)


def _target_depth(schema: object, ref: str, whole: int) -> int:
    """Depth below a JSON pointer such as ``#/$defs/node``, and the reference itself."""
    found = schema
    if not ref.startswith("#/"):
        return whole + 1
    for part in ref[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return whole + 1
    return _depth(found) + 1
