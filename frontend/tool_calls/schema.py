"""The JSON Schemas that forced and strict calls keep to."""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from ...engine_core.grammar_spec import GrammarSpec
from ...engine_core.grammar_text import llguidance_grammar
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.structural_tag import StructuralTag, TagStructure
from .declared import Function
from .parser import CallFormat
from .references import Schema, moved

_NONE: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}
_GUIDANCE: Final = "x-guidance"


def arguments_schema(function: Function, position: int) -> str:
    """The schema of the arguments of one function, by its place in tools. Raises RefusedError."""
    return msgspec.json.encode(_parameters(function, position)).decode()


def blamed(refused: Refused, functions: Mapping[str, Function], names: Collection[str]) -> Refused:
    """``refused``, what was said of a grammar of the functions ``names``, of one of them if it can.

    ``functions``: all, in the order of tools. Takes as long as to check their schemas.
    """
    for position, function in enumerate(functions.values()):
        if function.name in names:
            schema = arguments_schema(function, position)
            alone = llguidance_grammar(GrammarSpec("json_schema", schema, _field(position)))
            if isinstance(alone, Refused):
                return alone
    return refused


def calls_schema(functions: Mapping[str, Function], limit: int | None) -> str:
    """The schema of an array of one call or more, of any of the functions. Raises RefusedError."""
    calls: list[Schema] = []
    guidance: Schema = {}
    for position, function in enumerate(functions.values()):
        place = f"/items/anyOf/{position}/properties/arguments"
        parameters = _parameters(function, position)
        _merge(guidance, parameters.pop(_GUIDANCE, {}), function.name)
        try:
            arguments = moved(parameters, place)
        except ValueError as error:
            raise RefusedError(Refused(_field(position), str(error))) from None
        properties = {"name": {"const": function.name}, "arguments": arguments}
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
            schema=_parameters(function, position) if function.strict else {"type": "object"},
            end=behind,
        )
        for position, function in enumerate(functions.values())
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


def _field(position: int) -> str:
    return f"tools[{position}].function.parameters"


def _parameters(function: Function, position: int) -> Schema:
    """A copy of a function's schema, which says that it is of an object. Raises RefusedError."""
    if function.parameters is None:
        return dict(_NONE)
    if function.parameters.get("type", "object") != "object":
        kind = msgspec.json.encode(function.parameters["type"]).decode()[:80]
        reason = f"the parameters of {function.name} must be of type object, got {kind}"
        raise RefusedError(Refused(_field(position), reason))
    try:
        copied = msgspec.json.decode(msgspec.json.encode(function.parameters), type=Schema)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        reason = f"the parameters of {function.name} cannot be written as JSON: {error}"
        raise RefusedError(Refused(_field(position), reason)) from None
    copied.pop("$schema", None)  # what a generator of schemas puts at the top
    return {"type": "object"} | copied
