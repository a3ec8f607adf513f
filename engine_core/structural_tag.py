"""Structural tags: free text in which certain words begin a part whose form is fixed."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec


class TagStructure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part: ``begin``, which starts with a trigger, JSON of ``schema``, and ``end``."""

    begin: str
    schema: dict[str, object]
    end: str


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What follows a trigger is one of the structures that begin with it."""

    structures: list[TagStructure]
    triggers: list[str]
    at_least_one: bool = False
    stop_after_first: bool = False


def tag_grammar(tag: StructuralTag, special: Mapping[str, int]) -> str:
    """The tag as a Lark grammar of llguidance. Raises ValueError.

    ``special``: ids of the tokens that no text is made of; where one of them stands in a structure
    it is that token, and free text may hold those that are no triggers.
    """
    _check(tag)
    rules: list[str] = []
    tags: list[str] = []
    opening: set[str] = set()
    for number, trigger in enumerate(tag.triggers):
        first, *rest = _parts(trigger, special)
        if any(part in special for part in rest):
            raise ValueError(f"a special token stands within the trigger {trigger!r}; shorten it")
        if first in special:
            opening.add(first)
            token = f"TEXT {_terminal(first, special)} | spelled_{number}"
            rules.append(f"open_{number}: ({token}) {_terms(rest, special)}")
            rules.append(f"spelled_{number}[lazy]: TEXT {_terminal(first, {})}")
        else:
            rules.append(f"open_{number}[lazy]: TEXT {_terminal(first, special)}")
        bodies = [
            f"{_terms(_parts(one.begin.removeprefix(trigger), special), special)} %json "
            f"{_with_guidance(one.schema)} {_terms(_parts(one.end, special), special)}"
            for one in tag.structures
            if one.begin.startswith(trigger)
        ]
        rules.append(f"tag_{number}: open_{number} ({' | '.join(bodies)})")
        tags.append(f"tag_{number}")
    others = sorted(id for text, id in special.items() if text not in opening)
    between = ["other"] if others else []
    if others:
        rules.append(f"other: TEXT <[{','.join(map(str, others))}]>")
    free = f"({' | '.join(between)})*" if between else ""
    any_part = f"({' | '.join([*tags, *between])})*"
    one = f"({' | '.join(tags)})"
    match tag.at_least_one, tag.stop_after_first:
        case True, True:
            start = f"{free} {one}"
        case False, True:
            start = f"{free} ({' | '.join(tags)} | TEXT)"
        case True, False:
            start = f"{free} {one} {any_part} TEXT"
        case _:
            start = f"{any_part} TEXT"
    return "\n".join(["%llguidance {}", f"start: {start}", *rules, r"TEXT: /(.|\n)*/", ""])


def _check(tag: StructuralTag) -> None:
    if not tag.structures or not tag.triggers or "" in tag.triggers:
        raise ValueError("structures and triggers must hold at least one each, none empty")
    for one in tag.structures:
        if not any(map(one.begin.startswith, tag.triggers)):
            raise ValueError(f"{one.begin[:60]!r} begins with none of the triggers")
    for trigger in tag.triggers:
        if not any(one.begin.startswith(trigger) for one in tag.structures):
            raise ValueError(f"no structure begins with the trigger {trigger[:60]!r}")


def _parts(text: str, special: Mapping[str, int]) -> list[str]:
    """``text`` cut before and behind each special token, longest tokens first."""
    parts = [text] if text else []
    for token in sorted(special, key=len, reverse=True):
        parts = [
            piece
            for part in parts
            for piece in ([part] if part in special else _cut(part, token))
            if piece
        ]
    return parts


def _cut(text: str, token: str) -> Iterator[str]:
    first, *others = text.split(token)
    yield first
    for other in others:
        yield token
        yield other


def _terms(parts: Sequence[str], special: Mapping[str, int]) -> str:
    return " ".join(_terminal(part, special) for part in parts)


def _terminal(part: str, special: Mapping[str, int]) -> str:
    """A special token by its id, other text as a literal, which in Lark is a JSON string."""
    return f"<[{special[part]}]>" if part in special else msgspec.json.encode(part).decode()


def _with_guidance(schema: dict[str, object]) -> str:
    """The schema's text; JSON comes without white space unless it says otherwise itself."""
    own = schema.get("x-guidance")
    guidance = {"whitespace_flexible": False} | (own if isinstance(own, dict) else {})
    return msgspec.json.encode(schema | {"x-guidance": guidance}).decode()
