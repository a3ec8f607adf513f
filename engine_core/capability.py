"""One row of the capability table."""

from typing import Literal

import msgspec

Support = Literal["exact", "refused"]

# The columns of drafters, and what heads them; a plug-in's drafts are verified as NGRAM's are.
DRAFTERS = {
    "ngram": "NGRAM",
    "standalone": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
}


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """A feature, the request fields that ask for it, and what happens with each drafter.

    ``fields``: names in OpenAI's and the native API. ``none``: without a drafter. ``note``: the
    reason of a refusal with its remedy, else the rule that holds (what reproduces a seed, ...).
    """

    feature: str
    fields: tuple[str, ...]
    none: Support
    ngram: Support
    standalone: Support
    eagle: Support
    eagle3: Support
    dflash: Support
    dspark: Support
    note: str = ""

    @property
    def drafters(self) -> tuple[Support, ...]:
        """What happens with each of ``DRAFTERS``."""
        return (
            self.ngram,
            self.standalone,
            self.eagle,
            self.eagle3,
            self.dflash,
            self.dspark,
        )


def exact(feature: str, fields: tuple[str, ...], note: str = "") -> Capability:
    """Holds at every accepted position, with every drafter."""
    return _everywhere(feature, fields, "exact", note)


def refused(feature: str, fields: tuple[str, ...], note: str) -> Capability:
    """Refused whenever a field asks for it, with every drafter."""
    return _everywhere(feature, fields, "refused", note)


def _everywhere(feature: str, fields: tuple[str, ...], support: Support, note: str) -> Capability:
    return Capability(
        feature=feature,
        fields=fields,
        none=support,
        ngram=support,
        standalone=support,
        eagle=support,
        eagle3=support,
        dflash=support,
        dspark=support,
        note=note,
    )
