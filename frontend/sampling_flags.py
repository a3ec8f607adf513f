"""Sampling parameters from command-line flags, keyword arguments and JSON objects."""

import argparse
import typing
from collections.abc import Mapping

import msgspec

from ..engine_core.capabilities import is_supported, refuse_unsupported
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.sampling_params import SamplingParams
from . import grammars
from .errors import refused_by
from .grammar_flags import add_grammar_flags, grammar_from_flags

# Names that other engines use for the same parameter; giving both spellings is refused.
OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "sampling_seed": "seed",
}
MAX_VOCABULARY = 2**31 - 1
FIELDS = tuple(f.name for f in msgspec.structs.fields(SamplingParams))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for every sampling parameter but ``n``; absent ones keep their defaults."""
    group = parser.add_argument_group("sampling")
    hints = typing.get_type_hints(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in ("n", "grammar"):
            continue
        name = "--" + field.name.replace("_", "-")
        hint = hints[field.name]
        if hint is bool and field.name.startswith("no_"):
            group.add_argument(name, action="store_true", default=argparse.SUPPRESS)
        elif hint is bool:
            group.add_argument(
                name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS
            )
        elif typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
            group.add_argument(
                name,
                action="append",
                type=item,
                default=argparse.SUPPRESS,
                metavar=item.__name__.upper(),
                help="may be given several times",
            )
        elif typing.get_origin(hint) is dict:
            group.add_argument(
                name, metavar="JSON", default=argparse.SUPPRESS, help="e.g. '{\"17\": -5.0}'"
            )
        else:
            kind = float if hint is float else int
            group.add_argument(
                name, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__.upper()
            )
    add_grammar_flags(group)


def params_from_flags(namespace: argparse.Namespace) -> SamplingParams:
    """The sampling parameters of a parsed command line. Raises RefusedError, or UsageError for a
    file that cannot be read.
    """
    given: dict[str, object] = {k: v for k, v in vars(namespace).items() if k in FIELDS}
    bias = given.get("logit_bias")
    if isinstance(bias, str):
        try:
            given["logit_bias"] = msgspec.json.decode(bias, type=dict[int, float])
        except msgspec.MsgspecError as error:
            raise RefusedError(
                Refused("logit_bias", f"must be a JSON object of token id: bias: {error}")
            ) from None
    given["grammar"] = grammar_from_flags(namespace)
    params = params_from(given)
    # What is wrong for every model is said before one is loaded.
    refused = params.refuse(MAX_VOCABULARY)
    if refused is not None:
        raise RefusedError(refused)
    return params


def params_from(values: Mapping[str, object], base: SamplingParams | None = None) -> SamplingParams:
    """Sampling parameters from loose values over ``base``; None means the default.

    ``stop`` may be one string, in ``base`` too; a grammar comes in any of the fields that
    :mod:`grammars` knows. Raises RefusedError naming an unknown or wrong field.
    """
    merged = msgspec.structs.asdict(base) if base is not None else {}
    if isinstance(stop := merged.get("stop"), str):  # as OpenAI's clients write it
        merged["stop"] = (stop,)
    if (grammar := grammars.grammar_from(values)) is not None:
        merged["grammar"] = grammar
    renamed: set[str] = set()
    for key, value in values.items():
        if key == "grammar" or key in grammars.FIELDS:
            continue
        name = OTHER_NAMES.get(key, key)
        if name not in FIELDS:
            refused = refuse_unsupported({key: value})
            if refused is None and is_supported(key):
                names = ", ".join((*FIELDS, *grammars.FIELDS))
                refused = Refused(key, f"is not a sampling parameter: {names}")
            if refused is not None:
                raise RefusedError(refused)
            continue  # a label, or an unsupported field that asks for nothing
        if name in renamed:
            raise RefusedError(Refused(key, f"means the same as {name}; give one of them"))
        renamed.add(name)
        if value is not None:
            merged[name] = (value,) if name == "stop" and isinstance(value, str) else value
    try:
        return msgspec.convert(merged, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise RefusedError(refused_by(error, "sampling_params")) from None
