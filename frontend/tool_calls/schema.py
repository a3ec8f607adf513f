"""The JSON Schemas that forced and strict calls keep to."""

from collections.abc import Mapping
from typing import Final

import msgspec

from ...engine_core.grammar_keywords import subschemas
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.structural_tag import StructuralTag, TagStructure
from .declared import Function
from .parser import CallFormat

Schema = dict[str, object]
_NONE: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}
_GUIDANCE: Final = "x-guidance"
# What a generator of schemas puts at the top, and what would say another place is the top.
_LABELS: Final = ("$schema", "$id")


def arguments_schema(function: Function) -> str:
    """The schema of the arguments of one function. Raises RefusedError."""
    return msgspec.json.encode(_parameters(function)).decode()


def calls_schema(functions: Mapping[str, Function], limit: int | None) -> str:
    """The schema of an array of one call or more, of any of the functions. Raises RefusedError."""
    calls: list[Schema] = []
    guidance: Schema = {}
    for position, function in enumerate(functions.values()):
        place = f"/items/anyOf/{position}/properties/arguments"
        parameters = _parameters(function)
        _merge(guidance, parameters.pop(_GUIDANCE, {}), function.name)
        properties = {
            "name": {"const": function.name},
            "arguments": _moved(parameters, place),
        }
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    schema: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if limit is not None:
        schema["maxItems"] = limit
    if guidance:
        schema[_GUIDANCE] = guidance
    return msgspec.json.encode(schema).decode()


def strict_tags(functions: Mapping[str, Function], style: CallFormat, limit: int | None) -> str:
    """A structural tag for calls in free text; those of functions that are not strict are JSON.

    With a ``limit``, which is one call, nothing follows that.

    Raises RefusedError.
    """
    assert style.tag is not None
    before, between, behind = style.tag
    structures = [
        TagStructure(
            begin=before + function.name + between,
            schema=_parameters(function) if function.strict else {"type": "object"},
            end=behind,
        )
        for function in functions.values()
    ]
    tag = StructuralTag(
        structures=structures,
        triggers=[style.markers[0]],
        stop_after_first=limit is not None,
    )
    return msgspec.json.encode(tag).decode()


def _merge(guidance: Schema, added: object, name: str) -> None:
    """Add what one function's schema says of all JSON, which stands at the top of a schema alone.

    Raises RefusedError where two functions disagree.
    """
    if not isinstance(added, dict):
        raise RefusedError(Refused("tools", f'"{_GUIDANCE}" of {name} must be an object'))
    for key, value in added.items():
        if guidance.setdefault(key, value) != value:
            reason = (
                f'{key} in "{_GUIDANCE}" of {name} is another than that of a function before it; '
                "with tool_choice required it holds for all, so give them the same"
            )
            raise RefusedError(Refused("tools", reason))


def _parameters(function: Function) -> Schema:
    """A copy of a function's schema, which says that it is of an object. Raises RefusedError."""
    if function.parameters is None:
        return dict(_NONE)
    if function.parameters.get("type", "object") != "object":
        kind = msgspec.json.encode(function.parameters["type"]).decode()[:80]
        reason = f"the parameters of {function.name} must be of type object, got {kind}"
        raise RefusedError(Refused("tools", reason))
    try:
        copied = msgspec.json.decode(msgspec.json.encode(function.parameters), type=Schema)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        reason = f"the parameters of {function.name} cannot be written as JSON: {error}"
        raise RefusedError(Refused("tools", reason)) from None
    return {"type": "object"} | {k: v for k, v in copied.items() if k not in _LABELS}


def _moved(schema: Schema, place: str) -> Schema:
    """``schema`` with its references as they must be where it stands at ``place``."""
    for one in list(subschemas(schema)):
        ref = one.get("$ref")
        if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            one["$ref"] = f"#{place}{ref[1:]}"
    return schema
