"""How deep a JSON Schema may nest once its references are followed."""

from collections.abc import Iterator
from typing import Final
from urllib.parse import unquote

# About half of what a stack of 8 MiB holds.
MAX_DEPTH: Final = 1000


def schema_depth(schema: object) -> int:
    """An upper bound on nested objects and arrays, each reference followed once.

    ``schema``: decoded JSON. A reference that is no pointer counts as the whole document. Beyond
    ``MAX_DEPTH`` it is not counted on: the answer is then some number above it.
    """
    containers = _containers(schema)
    depths: dict[int, int] = {}  # by id: references to one place cost nothing more
    for one in reversed(containers):  # children before their parents
        below = [depths.get(id(child), 0) for child in _children(one)]
        depths[id(one)] = 1 + max(below) if below else 0
    whole = depths.get(id(schema), 0)
    total = whole
    # Spellings of one place count each: nothing says that the compiler knows them for the same.
    for ref in {ref for ref in _references(containers) if ref != "#"}:
        if total > MAX_DEPTH:
            break
        try:
            total += 1 + depths.get(id(pointed_at(schema, ref)), 0)
        except LookupError:
            total += 1 + whole
    return total


def pointed_at(schema: object, ref: str) -> object:
    """What a JSON pointer such as ``#/$defs/node`` points at. Raises LookupError."""
    if ref == "#":
        return schema
    if not ref.startswith("#/"):
        raise LookupError(ref)
    found = schema
    for part in ref[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and len(name) < 10:
            found = found[int(name)]
        else:
            raise LookupError(ref)
    return found


def _containers(schema: object) -> list[object]:
    """All objects and arrays, each after the one that holds it."""
    found = [schema]
    for one in found:
        found += [child for child in _children(one) if isinstance(child, dict | list)]
    return found


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _references(containers: list[object]) -> Iterator[str]:
    for one in containers:
        if isinstance(one, dict) and isinstance(ref := one.get("$ref"), str):
            yield ref
