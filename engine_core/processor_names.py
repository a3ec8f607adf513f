"""Custom logits processors by name: what a command line asks for, and what packages add.

Nothing is imported here: a server checks a command line in processes that must not load torch.
"""

import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, get_args

import msgspec

from .grammar_spec import GrammarKind
from .refusal import Refused

ENTRY_POINT_GROUP = "outrider.logits_processors"
FIELD = "logits_processors"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_PLACE = re.compile(r"[\w.]+:[\w.]+")
# What the engine itself does to logits, by the fields that ask for it and by their usual names.
RESERVED = frozenset(
    {
        "temperature", "top_k", "top_p", "min_p", "seed", "n", "logprobs", "penalties",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
        "allowed_token_ids", "min_tokens", "min_new_tokens", "max_tokens", "grammar",
        "structured_outputs", "response_format", "none", *get_args(GrammarKind),
    }
)  # fmt: skip


class Processor(NamedTuple):
    """A processor that may be loaded: its class is ``place``, "module:Class", of ``origin``."""

    name: str
    place: str
    origin: str


class KnownProcessor(msgspec.Struct, frozen=True):
    """A processor that ``package`` adds; ``refused`` says why its name cannot be used."""

    name: str
    package: str
    refused: str = ""


def known_processors() -> tuple[KnownProcessor, ...]:
    """The processors that packages installed here add, none of which is imported."""
    points = _plugins(tuple(sys.path))
    found = []
    for point in sorted(points, key=lambda one: one.name):
        refused = _refuse_name(point.name) or ""
        if not refused and sum(one.name == point.name for one in points) > 1:
            refused = f"several packages add {point.name}; keep one"
        package = "unknown" if point.dist is None else point.dist.name
        found.append(KnownProcessor(point.name, package, refused))
    return tuple(found)


def find_processors(asked: str | None) -> tuple[Processor, ...] | Refused:
    """The processors of a command line, "NAME", "module:Class" or "NAME=module:Class" with commas
    between them, in its order. Two of a name are refused.
    """
    found: list[Processor] = []
    for one in (asked or "").split(",") if asked else ():
        processor = _find(one.strip())
        if isinstance(processor, Refused):
            return processor
        if any(processor.name == other.name for other in found):
            return _refuse(
                f"{processor.name!r} stands there twice; call one of them NAME=module:Class"
            )
        found.append(processor)
    return tuple(found)


def refuse_unloaded(asked: str | None, wanted: Iterable[str]) -> Refused | None:
    """Why requests with these processors cannot be served beside the processors of a command line,
    which can be found (see ``refuse_processors``).
    """
    found = find_processors(asked)
    loaded = () if isinstance(found, Refused) else tuple(one.name for one in found)
    return next((unloaded(name, loaded) for name in wanted if name not in loaded), None)


def unloaded(name: str, loaded: Iterable[str]) -> Refused:
    """That a request asks for a processor which is not there."""
    names = ", ".join(loaded) or "none"
    return _refuse(f"{name!r} is not loaded (loaded: {names}); load it with --logits-processors")


def refuse_processors(asked: str | None, tp_size: int) -> Refused | None:
    """Why these processors cannot be loaded, as far as their names tell."""
    if asked is None:
        return None
    found = find_processors(asked)
    if isinstance(found, Refused):
        return found
    if tp_size > 1:
        return _refuse("do not work over several ranks yet; serve with --tp-size 1", 501)
    return None


def _find(text: str) -> Processor | Refused:
    if not text:
        return _refuse("a name between two commas is empty; leave it out")
    name, named, place = text.partition("=")
    if not named:
        if ":" not in text:
            return _find_plugin(text)
        name, place = text.rpartition(":")[2].rpartition(".")[2], text
    wrong = _refuse_name(name)
    if wrong is not None:
        remedy = "choose another name" if named else f"call it NAME={place}"
        return _refuse(f"{wrong}; {remedy}")
    if not _PLACE.fullmatch(place):
        return _refuse(f"{text!r} must be NAME, module:Class or NAME=module:Class")
    return Processor(name, place, place)


def _find_plugin(name: str) -> Processor | Refused:
    points = [point for point in _plugins(tuple(sys.path)) if point.name == name]
    if not points:
        known = ", ".join(sorted({point.name for point in _plugins(tuple(sys.path))})) or "none"
        return _refuse(
            f"no package here adds {name!r} (they add: {known}); install one, or give module:Class"
        )
    origins = [_origin(point) for point in points]
    wrong = _refuse_name(name)
    if wrong is not None:
        return _refuse(f"{origins[0]}: {wrong}; call it NAME={points[0].value}")
    if len(points) > 1:
        return _refuse(f"{' and '.join(origins[:2])} both add {name!r}; uninstall one")
    return Processor(name, points[0].value, origins[0])


def _refuse_name(name: str) -> str | None:
    if name.lower() in RESERVED:
        return f"{name} is a reserved name"
    if not _NAME.fullmatch(name):
        return f"{name!r} must be up to 64 letters, digits, _ and -, a letter first"
    return None


@lru_cache(maxsize=4)
def _plugins(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Entry points of the group; reading every package's takes tens of milliseconds."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _origin(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else point.dist.name
    return f"entry point {point.name} = {point.value} of {package}"


def _refuse(reason: str, status: int = 400) -> Refused:
    return Refused(FIELD, reason, status)
