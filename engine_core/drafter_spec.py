"""What the core knows of a drafter: a torch-free declaration, and the registry of names."""

import sys
from enum import Enum
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

import msgspec

from .refusal import Refused

ENTRY_POINT_GROUP = "outrider.drafters"
MIN_DRAFT_TOKENS = 2  # nodes of a row: the bonus token alone leaves no draft
MAX_DRAFT_TOKENS = 64  # nodes of a row, the bonus token included: one bit each in a mask


class DraftKV(Enum):
    """Where a drafter keeps its own key/value state."""

    NONE = "none"
    SHARED_SLOTS = "shared_slots"
    WINDOW_POOL = "window_pool"
    READS_TARGET = "reads_target"


class DrafterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of one algorithm.

    ``host``: proposes on the host from committed text, so its steps are late-bound; otherwise it
    drafts on the device, inside the step. ``implementation``: ``module:attribute`` of a function
    ``make(config: EngineConfig, spec: DrafterSpec) -> HostDrafter``, or on the device
    ``make(context: DrafterContext) -> DeviceDrafter``, imported by the process that runs the
    drafter. ``gives_q``: on the device it can draw its drafts and tell from what, which rejection
    sampling needs. ``fills``: with a host drafter, the implementation of one on the device that
    drafts for the rows that the host has nothing for; empty: there is none. ``shifts_tokens``: its
    KV of a position depends on the next token too, so what the prefix cache has of a prompt's last
    position was made for another prompt. ``default_num_draft_tokens``: of drafters without a model
    (:mod:`.spec_shape` has the others').
    """

    name: str
    implementation: str
    host: bool = False
    tree: bool = False
    gives_q: bool = False
    gives_survival: bool = False
    draft_kv: DraftKV = DraftKV.NONE
    shifts_tokens: bool = False
    default_num_draft_tokens: int = 4
    fills: str = ""

    @property
    def has_model(self) -> bool:
        """Whether it drafts with weights of its own, which are loaded beside the target's."""
        return self.draft_kv is not DraftKV.NONE

    @property
    def plans_verify(self) -> bool:
        """Whether its confidence can say which drafts are verified (:mod:`.verify_steps`)."""
        return self.gives_survival and not self.host

    @property
    def drafting_takes_time(self) -> bool:
        """Whether a step that drafts on the device has forward passes that others lack."""
        return bool(self.on_device) and self.has_model

    @property
    def built_in(self) -> bool:
        """Whether it is the project's own, by its name, which is reserved."""
        return self.name in RESERVED

    @property
    def on_device(self) -> str:
        """Implementation of the drafter on the device; empty without one."""
        return self.fills if self.host else self.implementation


NGRAM = DrafterSpec(
    name="NGRAM",
    implementation="outrider.engine_core.ngram:make",
    host=True,
    tree=True,
    default_num_draft_tokens=12,
)

_SUFFIX_MATCH = "outrider.engine.speculative.suffix_drafter:make"
NGRAM_BY_SOURCE: dict[str, DrafterSpec] = {
    "cpu": NGRAM,
    "gpu": DrafterSpec(name="NGRAM", implementation=_SUFFIX_MATCH, default_num_draft_tokens=12),
    "both": msgspec.structs.replace(NGRAM, fills=_SUFFIX_MATCH),
}

_EAGLE = DrafterSpec(
    name="EAGLE",
    implementation="outrider.engine.speculative.eagle_drafter:make",
    tree=True,
    gives_q=True,
    draft_kv=DraftKV.SHARED_SLOTS,
    shifts_tokens=True,
)
_BLOCK = DrafterSpec(
    name="DFLASH",
    implementation="outrider.engine.speculative.block_drafter:make",
    gives_q=True,
    draft_kv=DraftKV.SHARED_SLOTS,
)
BUILT_IN: dict[str, DrafterSpec] = {
    "NGRAM": NGRAM,
    "STANDALONE": DrafterSpec(
        name="STANDALONE",
        implementation="outrider.engine.speculative.standalone_drafter:make",
        tree=True,
        gives_q=True,
        draft_kv=DraftKV.SHARED_SLOTS,
    ),
    "EAGLE": _EAGLE,
    "EAGLE3": msgspec.structs.replace(_EAGLE, name="EAGLE3"),
    "DFLASH": _BLOCK,
    "DSPARK": msgspec.structs.replace(_BLOCK, name="DSPARK", gives_survival=True),
}

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
_UNBUILT = set(RESERVED) - set(BUILT_IN)


class KnownDrafter(msgspec.Struct, frozen=True):
    """A drafter that may be asked for by ``name``; ``package`` adds it, empty for built-in ones.

    Every feature is supported with it as the capability table says of NGRAM, except that
    ``refused`` says why the name cannot be used at all.
    """

    name: str
    package: str = ""
    refused: str = ""


def known_drafters() -> tuple[KnownDrafter, ...]:
    """Built-in drafters, and those that packages add, none of which is imported."""
    plugins = _plugins(tuple(sys.path))
    names = [point.name.upper() for point in plugins]
    found = [KnownDrafter(name) for name in BUILT_IN]
    for name, point in sorted(zip(names, plugins, strict=True), key=lambda pair: pair[0]):
        refused = ""
        if name in RESERVED:
            refused = f"{name} is a reserved name; uninstall the package"
        elif names.count(name) > 1:
            refused = f"several packages add {name}; keep one"
        package = "unknown" if point.dist is None else point.dist.name
        found.append(KnownDrafter(name, package, refused))
    return tuple(found)


def find_drafter(name: str) -> DrafterSpec | Refused:
    """Look a drafter up by its (case-insensitive) name: built-in ones, then entry points.

    A plug-in is an entry point of group ``outrider.drafters`` whose object is a DrafterSpec.
    """
    key = name.upper()
    plugins = _plugins(tuple(sys.path))
    found = [point for point in plugins if point.name.upper() == key]
    if key in RESERVED:
        if found:
            return _refuse(f"{_origin(found[0])} takes the reserved name {key}; uninstall it")
        if key == "NONE":
            return _refuse("leave it out to decode without drafts")
        return BUILT_IN.get(key) or _refuse(
            f"{key} is not built yet; choose one of {_choices(plugins)}, or leave it out", 501
        )
    if not found:
        return _refuse(f"unknown {name!r}; choose one of {_choices(plugins)}")
    if len(found) > 1:
        both = " and ".join(_origin(point) for point in found[:2])
        return _refuse(f"{both} both add {key}; uninstall one")
    return _load_plugin(key, found[0])


@lru_cache(maxsize=4)
def _plugins(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Entry points of the group; reading every package's takes tens of milliseconds."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _load_plugin(key: str, point: EntryPoint) -> DrafterSpec | Refused:
    origin = _origin(point)
    try:
        spec: object = point.load()
    except Exception as error:  # a plug-in's import may raise anything
        return _refuse(f"{origin} cannot be loaded: {type(error).__name__}: {error}")
    if not isinstance(spec, DrafterSpec):
        return _refuse(f"{origin} gives {type(spec).__name__}, not an outrider DrafterSpec")
    try:
        msgspec.convert(msgspec.structs.asdict(spec), DrafterSpec)
    except msgspec.ValidationError as error:
        return _refuse(f"{origin} gives a DrafterSpec that is not valid: {error}")
    if spec.name.upper() != key:
        return _refuse(f"{origin} declares the name {spec.name!r}; the two must be equal")
    if not MIN_DRAFT_TOKENS <= spec.default_num_draft_tokens <= MAX_DRAFT_TOKENS:
        return _refuse(
            f"{origin}: default_num_draft_tokens must be {MIN_DRAFT_TOKENS} to {MAX_DRAFT_TOKENS}"
        )
    if spec.draft_kv is not DraftKV.NONE:
        return _refuse(
            f"{origin} declares draft_kv {spec.draft_kv.name}; only the engine's own draft models "
            "have a KV pool, which is planned and paged with the target's: declare NONE and keep "
            "state by slot",
            501,
        )
    if spec.fills:
        return _refuse(
            f"{origin} declares fills; a plug-in drafts on the host or on the device, not on both: "
            "leave it out",
            501,
        )
    if spec.shifts_tokens:
        return _refuse(
            f"{origin} declares shifts_tokens, which is about a draft's own KV; leave it out", 501
        )
    if spec.gives_q and spec.host:
        return _refuse(
            f"{origin} declares gives_q and host; drafts are drawn on the device alone: leave one "
            "out",
            501,
        )
    if spec.gives_survival and (spec.host or spec.tree):
        return _refuse(
            f"{origin} declares gives_survival, which is of chains that are drafted on the device; "
            "leave it out",
            501,
        )
    return spec


def _origin(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else point.dist.name
    return f"entry point {point.name} = {point.value} of {package}"


def _choices(plugins: tuple[EntryPoint, ...]) -> str:
    return ", ".join(sorted({*BUILT_IN, *(point.name.upper() for point in plugins)} - _UNBUILT))


def _refuse(reason: str, status: int = 400) -> Refused:
    return Refused("speculative_algorithm", reason, status)
