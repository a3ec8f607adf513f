"""Sampling parameters from command-line flags, keyword arguments and JSON objects."""

import argparse
import types
import typing
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from ..engine_core.capabilities import is_default, is_supported, refuse_unsupported
from ..engine_core.config import EngineConfig
from ..engine_core.grammar_spec import GrammarSpec
from ..engine_core.processor_names import refuse_unloaded
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


class _JsonForm(NamedTuple):
    """A flag whose value is JSON: its type, that in words, and an example."""

    type: type[object]
    words: str
    example: str


_JSON_FORMS = {
    "logit_bias": _JsonForm(dict[int, float], "object of token id: bias", '{"17": -5.0}'),
    "bad_words_ids": _JsonForm(
        tuple[tuple[int, ...], ...], "list of lists of token ids", "[[17], [4, 9]]"
    ),
    "logits_processors": _JsonForm(
        dict[str, dict[str, object]],
        "object of a processor's name: its arguments",
        '{"two_back": {"strength": 3}}',
    ),
}
_FLAG_OF = {"logits_processors": "logits_processor_args"}  # the engine's flag has the field's name
FIELDS = tuple(f.name for f in msgspec.structs.fields(SamplingParams))


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for every sampling parameter but ``n``; absent ones keep their defaults."""
    group = parser.add_argument_group("sampling")
    hints = typing.get_type_hints(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in ("n", "grammar"):
            continue
        name = "--" + _FLAG_OF.get(field.name, field.name).replace("_", "-")
        hint = _without_none(hints[field.name])
        if hint is bool and field.name.startswith("no_"):
            group.add_argument(name, action="store_true", default=argparse.SUPPRESS)
        elif hint is bool:
            group.add_argument(
                name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS
            )
        elif field.name in _JSON_FORMS:
            example = f"e.g. '{_JSON_FORMS[field.name].example}'"
            group.add_argument(name, metavar="JSON", default=argparse.SUPPRESS, help=example)
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
        else:
            kind = float if hint is float else int
            group.add_argument(
                name, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__.upper()
            )
    add_grammar_flags(group)


def _without_none(hint: object) -> object:
    """The other half of ``X | None``."""
    if typing.get_origin(hint) is not types.UnionType:
        return hint
    return next(one for one in typing.get_args(hint) if one is not type(None))


def params_from_flags(namespace: argparse.Namespace) -> SamplingParams:
    """The sampling parameters of a parsed command line. Raises RefusedError, or UsageError for a
    file that cannot be read.
    """
    flags = vars(namespace)
    named = ((field, _FLAG_OF.get(field, field)) for field in FIELDS)
    given: dict[str, object] = {field: flags[flag] for field, flag in named if flag in flags}
    for name, form in _JSON_FORMS.items():
        text = given.get(name)
        if isinstance(text, str):
            given[name] = _read_json(name, form, text)
    given["grammar"] = grammar_from_flags(namespace)
    params = params_from(given)
    # What is wrong for every model is said before one is loaded.
    refused = params.refuse(MAX_VOCABULARY)
    if refused is not None:
        raise RefusedError(refused)
    return params


def processor_calls(text: str) -> dict[str, dict[str, object]]:
    """What ``--logits-processor-args`` says. Raises RefusedError."""
    name = "logits_processors"
    found = _read_json(name, _JSON_FORMS[name], text)
    return msgspec.convert(found, dict[str, dict[str, object]])


def refuse_unloaded_calls(config: EngineConfig, calls: Iterable[str]) -> None:
    """Raise RefusedError for processors of ``--logits-processor-args`` that no flag loads."""
    refused = refuse_unloaded(config.logits_processors, calls)
    if refused is not None:
        raise RefusedError(Refused(_FLAG_OF[refused.field], refused.reason))


def _read_json(name: str, form: _JsonForm, text: str) -> object:
    try:
        return msgspec.json.decode(text, type=form.type)
    except msgspec.MsgspecError as error:
        reason = f"must be a JSON {form.words}: {error}"
        raise RefusedError(Refused(_FLAG_OF.get(name, name), reason)) from None


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
    elif isinstance(grammar := merged.get("grammar"), GrammarSpec):
        merged["grammar"] = grammars.well_formed(grammar)
    renamed: set[str] = set()
    for key, value in values.items():
        if key == "grammar" or key in grammars.FIELDS:
            continue
        name = OTHER_NAMES.get(key, key)
        if name not in FIELDS:
            refused = refuse_unsupported({key: value})
            if refused is None and is_supported(key) and not is_default(key, value):
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
