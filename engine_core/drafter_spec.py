"""What the core knows of a drafter: a torch-free declaration, and the registry of names."""

from enum import Enum
from importlib.metadata import entry_points

import msgspec

from .refusal import Refused

ENTRY_POINT_GROUP = "outrider.drafters"


class DraftKV(Enum):
    """Where a drafter keeps its own key/value state."""

    NONE = "none"
    SHARED_SLOTS = "shared_slots"
    WINDOW_POOL = "window_pool"
    READS_TARGET = "reads_target"


class DrafterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of one algorithm (ARCHITECTURE section 3).

    ``host``: proposes on the host from committed text, so its steps are late-bound.
    ``implementation``: ``module:attribute`` of the drafter, imported by the side that runs it.
    """

    name: str
    implementation: str
    host: bool = False
    tree: bool = False
    gives_q: bool = False
    gives_survival: bool = False
    draft_kv: DraftKV = DraftKV.NONE
    target_layers: tuple[int, ...] = ()
    default_num_draft_tokens: int = 4


NGRAM = DrafterSpec(
    name="NGRAM",
    implementation="outrider.engine_core.ngram:NgramProposer",
    host=True,
    tree=True,
    default_num_draft_tokens=12,
)

BUILT_IN: dict[str, DrafterSpec] = {"NGRAM": NGRAM}

# Names of algorithms that the project reserves; the ones without a spec are refused by name.
RESERVED = (
    "NGRAM",
    "STANDALONE",
    "EAGLE",
    "EAGLE3",
    "NEXTN",
    "MTP",
    "FROZEN_KV_MTP",
    "DFLASH",
    "DSPARK",
    "NONE",
)


def find_drafter(name: str) -> DrafterSpec | Refused:
    """Look a drafter up by its (case-insensitive) name: built-in first, then entry points.

    A plug-in is an entry point of group ``outrider.drafters`` whose object is a DrafterSpec.
    """
    key = name.upper()
    if key in BUILT_IN:
        return BUILT_IN[key]
    if key in RESERVED:
        return Refused(
            "speculative_algorithm",
            f"{key} is not built yet; choose one of {', '.join(sorted(BUILT_IN))}, or leave it out",
            501,
        )
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name.upper() == key:
            return _load_plugin(key, point.load())
    known = sorted({*BUILT_IN, *(p.name.upper() for p in entry_points(group=ENTRY_POINT_GROUP))})
    return Refused("speculative_algorithm", f"unknown {name!r}; choose one of {', '.join(known)}")


def _load_plugin(key: str, spec: object) -> DrafterSpec | Refused:
    if not isinstance(spec, DrafterSpec):
        return Refused(
            "speculative_algorithm",
            f"entry point {key} of {ENTRY_POINT_GROUP} gives {type(spec).__name__}, "
            "not an outrider DrafterSpec",
        )
    if spec.name.upper() != key:
        return Refused(
            "speculative_algorithm",
            f"entry point {key} declares the name {spec.name!r}; the two must be equal",
        )
    return spec
