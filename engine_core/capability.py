"""One row of the capability table."""

from typing import Literal

import msgspec

Support = Literal["exact", "refused"]


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """A feature, the request fields that ask for it, and what happens with each drafter.

    ``fields``: names in OpenAI's and the native API. ``none``: without a drafter. ``note``: the
    reason of a refusal with its remedy, else the rule that holds (what reproduces a seed, ...).
    """

    feature: str
    fields: tuple[str, ...]
    none: Support
    ngram: Support
    note: str = ""


def exact(feature: str, fields: tuple[str, ...], note: str = "") -> Capability:
    """Holds at every accepted position, with every drafter."""
    return Capability(feature=feature, fields=fields, none="exact", ngram="exact", note=note)


def refused(feature: str, fields: tuple[str, ...], note: str) -> Capability:
    """Refused whenever a field asks for it, with every drafter."""
    return Capability(feature=feature, fields=fields, none="refused", ngram="refused", note=note)
