"""The fields in which requests ask for a grammar, and the one ``GrammarSpec`` they become.

Names are SGLang's (``json_schema``, ``regex``, ``ebnf``), vLLM's (``guided_*``,
``structured_outputs``) and OpenAI's (``response_format``).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, get_args

import msgspec

from ..engine_core.grammar_spec import GrammarKind, GrammarSpec
from ..engine_core.grammar_text import MAX_GRAMMAR_BYTES, llguidance_grammar
from ..engine_core.refusal import Refused, RefusedError
from .errors import refused_by
from .structural_tags import tag_text

# Up to here the syntax is checked at once, in a millisecond or a few; of longer texts by the core.
_CHECKED_CHARS: Final = 8 * 1024

_FORMAT_TYPES: Final = ("text", "json_object", "json_schema", "structural_tag")
Schema = str | dict[str, object]  # the text of a JSON Schema, or the schema itself


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's object. Its ``disable_*`` name what never happens here."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Schema | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None


class GrammarFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every entry takes; null, false and empty texts ask for nothing."""

    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    structural_tag: Schema | None = None
    structured_outputs: StructuredOutputs | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``json_schema``; the schema holds whether or not ``strict`` is set."""

    schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's object, and structural_tag, which SGLang and vLLM have beside its types.

    The last three are those of a structural tag.
    """

    type: str = "text"
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, object]] | None = None
    triggers: list[str] | None = None
    format: dict[str, object] | None = None


FIELDS: Final = GrammarFields.__struct_fields__
_KINDS: Final[dict[str, GrammarKind]] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
}
_STRUCTURED_KINDS: Final[dict[str, GrammarKind]] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


def grammar_of(
    body: GrammarFields, response_format: ResponseFormat | None = None, prefix: str = ""
) -> GrammarSpec | None:
    """The grammar that a body asks for; ``prefix`` stands before its fields' names in errors.

    Raises RefusedError for more than one, and for what is no grammar.
    """
    return one_grammar([*_asked(body, prefix), *_asked_format(response_format, prefix)])


def grammar_from(values: Mapping[str, object]) -> GrammarSpec | None:
    """The grammar of loose values, of which only :data:`FIELDS` and ``grammar`` are looked at.

    Raises RefusedError.
    """
    given = {name: values[name] for name in FIELDS if values.get(name) is not None}
    try:
        asked = list(_asked(msgspec.convert(given, GrammarFields), ""))
    except msgspec.ValidationError as error:
        raise RefusedError(refused_by(error, "grammar")) from None
    whole = values.get("grammar")
    if isinstance(whole, GrammarSpec):
        asked.append(well_formed(whole))
    elif whole is not None:
        raise RefusedError(
            Refused("grammar", "must be a GrammarSpec; json_schema, regex or ebnf take text")
        )
    return one_grammar(asked)


def well_formed(spec: GrammarSpec) -> GrammarSpec:
    """``spec``, as its types say it is: Python checks none of them. Raises RefusedError."""
    try:
        return msgspec.convert(msgspec.structs.asdict(spec), GrammarSpec)
    except msgspec.ValidationError as error:
        kinds = ", ".join(get_args(GrammarKind))
        refused = refused_by(error, "grammar")
        raise RefusedError(
            Refused(
                "grammar",
                f"has a wrong {refused.field}: {refused.reason}; it is a "
                f"GrammarSpec(kind, text) of two texts, kind one of {kinds}",
            )
        ) from None


def one_grammar(asked: Iterable[GrammarSpec]) -> GrammarSpec | None:
    """The only one of ``asked``. Raises RefusedError for several, or for what is no grammar."""
    specs = list(asked)
    if not specs:
        return None
    if len(specs) > 1:
        first, second = specs[:2]
        raise RefusedError(
            Refused(second.field, f"cannot hold together with {first.field}; give one of the two")
        )
    [spec] = specs
    if len(spec.text) <= _CHECKED_CHARS or len(spec.text) > MAX_GRAMMAR_BYTES:
        checked = llguidance_grammar(spec)
        if isinstance(checked, Refused):
            raise RefusedError(checked)
    return spec


def grammar_spec(kind: GrammarKind, value: object, field: str) -> GrammarSpec | None:
    """``value`` of a field as a grammar; None where it asks for nothing. Raises RefusedError."""
    if value is None or value is False or value == "":
        return None
    if kind == "json_object":
        return GrammarSpec(kind, "", field)
    if kind == "structural_tag" and isinstance(value, str | dict):
        return GrammarSpec(kind, tag_text(value, field), field)
    if isinstance(value, str):
        return GrammarSpec(kind, value, field)
    if value == []:
        raise RefusedError(Refused(field, "is empty; give at least one string, or leave it out"))
    try:
        return GrammarSpec(kind, msgspec.json.encode(value).decode(), field)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RefusedError(Refused(field, f"cannot be written as JSON: {error}")) from None


def _asked(body: GrammarFields, prefix: str) -> Iterator[GrammarSpec]:
    yield from _specs(body, _KINDS, prefix)
    if body.structured_outputs is not None:
        yield from _specs(
            body.structured_outputs, _STRUCTURED_KINDS, prefix + "structured_outputs."
        )


def _specs(
    holder: msgspec.Struct, kinds: Mapping[str, GrammarKind], prefix: str
) -> Iterator[GrammarSpec]:
    for name, kind in kinds.items():
        spec = grammar_spec(kind, getattr(holder, name), prefix + name)
        if spec is not None:
            yield spec


def _asked_format(asked: ResponseFormat | None, prefix: str) -> Iterator[GrammarSpec]:
    if asked is None:
        return
    name = prefix + "response_format"
    if asked.type not in _FORMAT_TYPES:
        reason = f"must be one of {', '.join(_FORMAT_TYPES)}, got {asked.type!r}"
        raise RefusedError(Refused(f"{name}.type", reason))
    for field in asked.__struct_fields__[1:]:
        kind = "json_schema" if field == "json_schema" else "structural_tag"
        if getattr(asked, field) is not None and asked.type != kind:
            raise RefusedError(Refused(f"{name}.{field}", f"needs type {kind}, got {asked.type!r}"))
    if asked.type == "json_object":
        yield GrammarSpec("json_object", "", name)
    elif asked.type == "structural_tag":
        parts = {field: getattr(asked, field) for field in ("structures", "triggers", "format")}
        given = {field: part for field, part in parts.items() if part is not None}
        yield GrammarSpec("structural_tag", tag_text(given, name), name)
    elif asked.type == "json_schema":
        schema = None if asked.json_schema is None else asked.json_schema.schema
        spec = grammar_spec("json_schema", schema, f"{name}.json_schema")
        if spec is None:
            raise RefusedError(
                Refused(f"{name}.json_schema.schema", "is required with type json_schema")
            )
        yield spec
