"""The keywords of a JSON Schema: an unknown one, which llguidance passes over, is refused here."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Final

import msgspec

from .grammar_depth import pointed_at

# Keywords by what their value holds.
_ONE_SCHEMA: Final = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_LIST_OF_SCHEMAS: Final = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_SCHEMAS_BY_NAME: Final = frozenset(
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
)
# Drafts 7 to 2020-12, and the two labels of OpenAPI that change no meaning. What of these cannot
# be kept llguidance refuses.
_KNOWN: Final = (
    _ONE_SCHEMA
    | _LIST_OF_SCHEMAS
    | _SCHEMAS_BY_NAME
    | frozenset(
        [
            "$anchor",
            "$comment",
            "$dynamicAnchor",
            "$dynamicRef",
            "$id",
            "$recursiveAnchor",
            "$recursiveRef",
            "$ref",
            "$schema",
            "$vocabulary",
            "const",
            "contentEncoding",
            "contentMediaType",
            "default",
            "dependentRequired",
            "deprecated",
            "description",
            "discriminator",
            "enum",
            "example",
            "examples",
            "exclusiveMaximum",
            "exclusiveMinimum",
            "format",
            "maxContains",
            "maxItems",
            "maxLength",
            "maxProperties",
            "maximum",
            "minContains",
            "minItems",
            "minLength",
            "minProperties",
            "minimum",
            "multipleOf",
            "pattern",
            "readOnly",
            "required",
            "title",
            "type",
            "uniqueItems",
            "writeOnly",
        ]
    )
)
_GUIDANCE: Final = "x-guidance"
_SHOWN: Final = 100  # characters of a path

# The names that lead to a schema, the last one first: written out for a refusal only.
_Path = tuple["_Path", str] | None


def check_keywords(schema: dict[str, object]) -> None:
    """Raise ValueError for an unknown keyword at any place of a schema, unless it is lenient.

    ``schema``: decoded JSON. Names that start with ``x-`` are extensions and mean nothing, but
    ``x-guidance``, which has to stand at the top.
    """
    guidance = schema.get(_GUIDANCE, {})
    if not isinstance(guidance, dict):
        raise ValueError(f'"{_GUIDANCE}" must be an object')
    if guidance.get("lenient") is True:
        return
    for place, path in _schemas(schema):
        for name in place:
            if name == _GUIDANCE and place is not schema:
                raise ValueError(f"{_shown(path, name)} has to stand at the top of the schema")
            if name not in _KNOWN and not name.startswith("x-"):
                raise ValueError(_unknown(path, name))


def subschemas(schema: dict[str, object]) -> Iterator[dict[str, object]]:
    """All objects within a schema that are schemas, itself first."""
    return (place for place, _ in _schemas(schema))


def _schemas(schema: dict[str, object]) -> Iterator[tuple[dict[str, object], _Path]]:
    """All objects that are schemas, also those that only a reference makes one."""
    waiting: list[tuple[object, _Path]] = [(schema, None)]
    seen: set[int] = set()
    followed: set[str] = set()
    while waiting:
        place, path = waiting.pop()
        if not isinstance(place, dict) or id(place) in seen:
            continue
        seen.add(id(place))
        yield place, path
        for name, value in place.items():
            below = (path, name)
            if name in _ONE_SCHEMA:
                waiting.append((value, below))
            if name in _LIST_OF_SCHEMAS and isinstance(value, list):
                waiting += [(one, (below, str(i))) for i, one in enumerate(value)]
            elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                waiting += [(one, (below, key)) for key, one in value.items()]
            elif name == "$ref" and isinstance(value, str) and value not in followed:
                followed.add(value)
                try:
                    waiting.append((pointed_at(schema, value), (None, value.removeprefix("#/"))))
                except LookupError:
                    continue  # llguidance says what it thinks of it


def _unknown(path: _Path, name: str) -> str:
    near = get_close_matches(name[:_SHOWN], _KNOWN, 1)
    meant = f', did you mean "{near[0]}"?' if near else ";"
    return (
        f"{_shown(path, name)} is no keyword of JSON Schema{meant} leave it out, or say "
        f'"{_GUIDANCE}": {{"lenient": true}} in the schema to ignore it'
    )


def _shown(path: _Path, name: str) -> str:
    names = [name]
    while path is not None:
        path, above = path
        names.append(above)
    text = "#/" + "/".join(reversed(names))
    if len(text) > _SHOWN:
        text = "..." + text[-_SHOWN:]
    return msgspec.json.encode(text).decode()
