"""Structural tags as SGLang and vLLM take them, older and newer form, as the core's own."""

from typing import Literal

import msgspec

from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.structural_tag import StructuralTag, TagStructure
from .errors import refused_by


class _JsonContent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    json_schema: dict[str, object]


class _Tag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    begin: str
    content: _JsonContent
    end: str
    type: Literal["tag"] = "tag"


class _TriggeredTags(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The one of xgrammar's formats that is known here."""

    type: Literal["triggered_tags"]
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``structures`` and ``triggers``, or ``format``."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None
    format: _TriggeredTags | None = None


def tag_text(value: str | dict[str, object], field: str) -> str:
    """A tag, or its JSON, in the core's notation. Raises RefusedError that names ``field``."""
    try:
        if isinstance(value, str):
            fields = msgspec.json.decode(value, type=TagFields)
        else:
            fields = msgspec.convert(value, TagFields)
        return msgspec.json.encode(_tag(fields)).decode()
    except msgspec.DecodeError as error:
        refused = refused_by(error, "it")
        reason = (
            f"{refused.field}: {refused.reason}; a tag has structures (begin, schema, end) and "
            "triggers, or a format of type triggered_tags whose tags have json_schema contents"
        )
    except (ValueError, TypeError, RecursionError) as error:
        reason = str(error)
    raise RefusedError(Refused(field, reason))


def _tag(fields: TagFields) -> StructuralTag:
    """Raises ValueError."""
    form, structures, triggers = fields.format, fields.structures, fields.triggers
    if form is None:
        if structures is None or triggers is None:
            raise ValueError("needs structures and triggers, or format; send one of the two")
        return StructuralTag(structures=structures, triggers=triggers)
    if structures is not None or triggers is not None:
        raise ValueError("has format beside structures or triggers; send one of the two")
    return StructuralTag(
        structures=[
            TagStructure(begin=tag.begin, schema=tag.content.json_schema, end=tag.end)
            for tag in form.tags
        ],
        triggers=form.triggers,
        at_least_one=form.at_least_one,
        stop_after_first=form.stop_after_first,
    )
