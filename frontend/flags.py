"""Command-line flags made from annotated config structs, config files and keyword arguments.

Layers, weakest first: a struct's defaults, ``--config FILE``, the command line.
"""

import argparse
import difflib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from ..engine_core.config import EngineConfig, refuse_config
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.speculative_config import apply_speculative_config
from .errors import refused_by
from .server_config import ServerConfig, refuse_server

Value = str | int | float | bool | None

ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("--model", "--model-path"),
    "tokenizer_path": ("--tokenizer-path", "--tokenizer"),
    "speculative_draft_model_path": (
        "--speculative-draft-model-path",
        "--speculative-draft-model",
    ),
    "tp_size": ("--tp-size", "--tensor-parallel-size"),
}
SPECULATIVE_CONFIG = "speculative_config"
# Every name of a flag is a key of a config file and a keyword of LLM, too.
_FIELD_OF = {
    name.removeprefix("--").replace("-", "_"): field
    for field, names in ALIASES.items()
    for name in names
}
S = TypeVar("S", bound=msgspec.Struct)


class UsageError(ValueError):
    """A flag or config file that cannot be used; the CLI prints it and exits with status 2."""


class Flag(NamedTuple):
    """One field of a config struct as a flag."""

    field: str
    names: tuple[str, ...]
    kind: Callable[[str], Value] | None  # None: a boolean
    choices: tuple[str, ...] | None
    optional: bool
    default: Value
    required: bool
    help: str


def flags_of(struct: type[msgspec.Struct]) -> list[Flag]:
    """The flags of a config struct, in field order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    return [_flag(field, hints[field.name]) for field in msgspec.structs.fields(struct)]


def _flag(field: msgspec.structs.FieldInfo, hint: object) -> Flag:
    text = ""
    if typing.get_origin(hint) is typing.Annotated:
        hint, *extras = typing.get_args(hint)
        text = next((e.description or "" for e in extras if isinstance(e, msgspec.Meta)), "")
    parts = set(typing.get_args(hint)) if _is_union(hint) else {hint}
    optional = type(None) in parts
    parts.discard(type(None))
    if len(parts) != 1:
        raise TypeError(f"{field.name}: a flag has one type, got {hint}")
    base = parts.pop()
    choices = typing.get_args(base) if typing.get_origin(base) is Literal else None
    kinds: dict[object, Callable[[str], Value]] = {int: int, float: float, str: str}
    dashed = "--" + field.name.replace("_", "-")
    return Flag(
        field=field.name,
        names=ALIASES.get(field.name, (dashed,)),
        kind=None if base is bool else str if choices else kinds[base],
        choices=choices,
        optional=optional,
        default=None if field.required else field.default,
        required=field.required,
        help=text,
    )


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def add_flags(
    parser: argparse.ArgumentParser,
    struct: type[msgspec.Struct],
    title: str,
    hidden: Collection[str] = (),
) -> None:
    """Add the flags of ``struct``; what the user leaves out is absent from the namespace.

    ``hidden``: fields that ``--help`` does not show.
    """
    group = parser.add_argument_group(title)
    for flag in flags_of(struct):
        shown = flag.help + ("" if flag.required else f" (default: {shown_value(flag.default)})")
        shown = argparse.SUPPRESS if flag.field in hidden else shown.replace("%", "%%")
        if flag.kind is None:
            group.add_argument(
                *flag.names,
                dest=flag.field,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=shown,
            )
        else:
            group.add_argument(
                *flag.names,
                dest=flag.field,
                type=flag.kind,
                choices=flag.choices,
                default=argparse.SUPPRESS,
                help=shown,
                metavar=None if flag.choices else flag.kind.__name__.upper(),
            )


def add_engine_flags(parser: argparse.ArgumentParser, absent: Collection[str] = ()) -> None:
    """Add the engine's flags, ``--config`` and ``--speculative-config``.

    ``absent``: fields that this command has no use for; ``resolve_engine`` says so if one is given.
    """
    add_flags(parser, EngineConfig, "engine", absent)
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config", metavar="FILE", help="YAML or JSON file of flags; the command line wins"
    )
    example = '{"method": "ngram", "num_speculative_tokens": 11}'
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS
        if "speculative_algorithm" in absent
        else f"speculation as vLLM's JSON, e.g. '{example}'",
    )


def resolve_engine(
    namespace: argparse.Namespace, absent: Mapping[str, str] | None = None
) -> EngineConfig:
    """The engine configuration of a parsed command line. Raises UsageError or RefusedError.

    ``absent``: fields that must keep their defaults, and why.
    """
    merged = _merge(namespace, _fields(EngineConfig))
    defaults = {flag.field: flag.default for flag in flags_of(EngineConfig)}
    for field, reason in (absent or {}).items():
        if field in merged and merged[field] != defaults[field]:
            raise UsageError(f"{field}: {reason}")
    return _checked_engine(merged)


def given_engine_flags(namespace: argparse.Namespace) -> list[str]:
    """Fields of the engine that a parsed command line sets, ``speculative_config`` included."""
    return sorted(vars(namespace).keys() & {*_fields(EngineConfig), SPECULATIVE_CONFIG})


def resolve_server(namespace: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The engine's and the server's configuration. Raises UsageError or RefusedError."""
    ours = _fields(ServerConfig)
    merged = _merge(namespace, _fields(EngineConfig) | ours)
    engine = _checked_engine({k: v for k, v in merged.items() if k not in ours})
    server = _build(ServerConfig, {k: v for k, v in merged.items() if k in ours})
    refused = refuse_server(server)
    if refused is not None:
        raise RefusedError(refused)
    return engine, server


def _fields(struct: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct)}


def _merge(namespace: argparse.Namespace, known: set[str]) -> dict[str, object]:
    """The config file's values below the command line's."""
    given = {k: v for k, v in vars(namespace).items() if k in {*known, SPECULATIVE_CONFIG}}
    command_line = _expand_speculative(given, "the command line")
    if namespace.config is None:
        return command_line
    in_file = _expand_speculative(read_config(namespace.config, known), namespace.config)
    return in_file | command_line


def _checked_engine(values: Mapping[str, object]) -> EngineConfig:
    if "model" not in values:
        raise UsageError("--model is required: `pycoder`, a local folder or a Hugging Face id")
    engine = _build(EngineConfig, values)
    refused = refuse_config(engine)
    if refused is not None:
        raise RefusedError(refused)
    return engine


def engine_config(values: Mapping[str, object]) -> EngineConfig:
    """An engine configuration from keyword arguments, ``speculative_config`` included.

    Raises UsageError naming a keyword that no flag has, RefusedError for values.
    """
    given = _by_field(values, _fields(EngineConfig), "unknown engine option", "the arguments")
    return _checked_engine(_expand_speculative(given, "the arguments"))


def read_config(path: str, known: set[str]) -> dict[str, object]:
    """Read a config file; keys may use dashes or underscores. Raises UsageError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"--config: cannot read {path!r}: {error.strerror}") from None
    try:
        raw = (
            msgspec.json.decode(data, type=dict[str, object])
            if path.endswith(".json")
            else msgspec.yaml.decode(data, type=dict[str, object])
        )
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path!r} must hold one mapping of flags: {error}") from None
    return _by_field(raw, known, "--config: unknown key", repr(path))


def _by_field(
    values: Mapping[str, object], known: set[str], unknown: str, where: str
) -> dict[str, object]:
    """Values under their fields' names, from any name of a flag, with dashes or underscores.

    Raises UsageError for a name that no flag of ``known`` has and for two different values.
    """
    out: dict[str, object] = {}
    names: dict[str, str] = {}
    for name, value in values.items():
        plain = name.replace("-", "_")
        field = _FIELD_OF.get(plain, plain)
        if field not in known and field != SPECULATIVE_CONFIG:
            raise UsageError(f"{unknown} {name!r} in {where}{_closest(plain, known)}")
        if field in out and out[field] != value:
            raise UsageError(
                f"{names[field]} and {name} are both set in {where} and mean the same; "
                "leave one out"
            )
        out[field], names[field] = value, name
    return out


def _expand_speculative(values: Mapping[str, object], where: str) -> dict[str, object]:
    """Replace ``speculative_config`` (JSON text or a mapping) by the flags it stands for."""
    out = dict(values)
    raw = out.pop(SPECULATIVE_CONFIG, None)
    if raw is None:
        return out
    text = raw if isinstance(raw, str) else msgspec.json.encode(raw).decode()
    flags = apply_speculative_config(text)
    if isinstance(flags, Refused):
        raise RefusedError(flags)
    for name, value in flags.items():
        if out.get(name) is not None:
            raise UsageError(
                f"speculative_config and {name} are both set in {where} and mean the same; "
                "leave one out"
            )
        out[name] = value
    return out


def _build(struct: type[S], values: Mapping[str, object]) -> S:
    try:
        return msgspec.convert(dict(values), struct)
    except msgspec.ValidationError as error:
        raise UsageError(str(refused_by(error, struct.__name__))) from None


def _closest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known | _FIELD_OF.keys()), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def print_config(*configs: msgspec.Struct) -> str:
    """The resolved configuration as one line of text; keys and tokens are not shown."""
    shown: list[str] = []
    for config in configs:
        for field in msgspec.structs.fields(type(config)):
            value = getattr(config, field.name)
            if field.name in ("api_key", "zmq_token") and value is not None:
                value = "***"
            shown.append(f"{field.name}={shown_value(value)}")
    return "outrider configuration: " + " ".join(shown)


def shown_value(value: object) -> str:
    """A value as help texts and tables show it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
