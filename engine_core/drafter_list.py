"""The drafters that a configuration may name: the project's own, and those of other packages."""

import sys
from typing import Literal

import msgspec

from .drafter_spec import BUILT_IN, RESERVED, drafter_plugins, find_drafter, origin_of
from .refusal import Refused


class ListedDrafter(msgspec.Struct, frozen=True, kw_only=True):
    """One drafter. ``drafts_on``: with "host" a step waits for it; ``draft_model``: it needs one.

    ``origin``: "built in", or the entry point and its package. ``refused``: why it cannot be used.
    """

    name: str
    origin: str
    drafts_on: Literal["host", "device"] | None = None
    draft_model: bool = False
    tree: bool = False
    refused: str | None = None


def list_drafters() -> tuple[ListedDrafter, ...]:
    """All of them, the built-in ones first; plug-ins are imported as if they were asked for."""
    origins = dict.fromkeys(BUILT_IN, "built in")
    for point in drafter_plugins(tuple(sys.path)):
        name = point.name.upper()
        if name in RESERVED:
            origins.setdefault(name, origin_of(point))
        else:
            origins[name] = origin_of(point)
    return tuple(_listed(name, origin) for name, origin in origins.items())


def _listed(name: str, origin: str) -> ListedDrafter:
    spec = find_drafter(name)
    if isinstance(spec, Refused):
        return ListedDrafter(name=name, origin=origin, refused=spec.reason)
    return ListedDrafter(
        name=name,
        origin=origin,
        drafts_on="host" if spec.host else "device",
        draft_model=spec.has_model,
        tree=spec.tree,
    )


def drafters_markdown() -> str:
    """The list as a table."""
    lines = ["| drafter | drafts on | draft model | trees | origin |", "|---|---|---|---|---|"]
    for one in list_drafters():
        if one.refused is not None:
            cells = ["refused", "-", "-", f"{one.origin}: {one.refused}"]
        else:
            cells = [str(one.drafts_on), _word(one.draft_model), _word(one.tree), one.origin]
        lines.append(f"| {one.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _word(value: bool) -> str:
    return "yes" if value else "no"
