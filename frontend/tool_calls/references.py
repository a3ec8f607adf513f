"""References within one function's schema, as they must be where that becomes a part of another."""

from typing import Final
from urllib.parse import urldefrag, urljoin

from ...engine_core.grammar_keywords import subschemas

Schema = dict[str, object]
# Names that hold in a whole document: two functions may have the same, and mean different things.
_NAMES: Final = (
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
)
_REMEDY: Final = 'write the reference as a JSON pointer, such as "#/$defs/name"'
_SHOWN: Final = 80


def moved(schema: Schema, place: str) -> Schema:
    """``schema`` with its references as they must be where it stands at ``place``; without ``$id``.

    Those by the schema's own ``$id`` become pointers. Raises ValueError for what is no pointer, and
    for what would make it one of another document.
    """
    own = schema.pop("$id", None)
    base = urldefrag(own).url if isinstance(own, str) else ""
    for one in subschemas(schema):  # which follows pointers as they are written here
        for name in _NAMES:
            if name in one:
                raise ValueError(f"{name} does not work with tool_choice required; {_REMEDY}")
        if "$id" in one:
            reason = "an $id below the top does not work with tool_choice required; leave it out"
            raise ValueError(f"{reason}, and {_REMEDY}")
        if isinstance(ref := one.get("$ref"), str):
            one["$ref"] = _pointer(ref, base)
    for one in list(subschemas(schema)):
        if isinstance(ref := one.get("$ref"), str):
            one["$ref"] = f"#{place}{ref[1:]}"
    return schema


def _pointer(ref: str, base: str) -> str:
    """``ref`` as a pointer into the document that is called ``base``. Raises ValueError."""
    pointer = ref
    if not ref.startswith("#"):
        try:
            url, fragment = urldefrag(urljoin(base, ref))
        except ValueError:  # of an address that is none
            url, fragment = "", ref
        pointer = f"#{fragment}" if url == base else ""
    if pointer != "#" and not pointer.startswith("#/"):
        reason = "is neither a JSON pointer nor one into the schema's own $id"
        raise ValueError(f"$ref {ref[:_SHOWN]!r} {reason}; {_REMEDY}")
    return pointer
