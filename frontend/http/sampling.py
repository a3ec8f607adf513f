"""Sampling fields of requests, and the SamplingParams that they become."""

from collections.abc import Mapping

import msgspec

from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.sampling_params import SamplingParams
from ..expand import new_rid
from ..grammars import GrammarFields, ResponseFormat, grammar_of
from .errors import HttpError

# Names of the OpenAI endpoints, and what they are called inside.
OPENAI_NAMES = {"min_tokens": "min_new_tokens", "max_tokens": "max_new_tokens"}
_DIRECT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "include_stop_str_in_output",
    "n",
    "logit_bias",
    "bad_words",
    "bad_words_ids",
    "allowed_token_ids",
    "logits_processors",
    "seed",
)


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_usage``: a last chunk with usage; ``continuous_usage_stats``: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIRequest(GrammarFields, kw_only=True):
    """Fields that completions and chat share; null means the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    bad_words_ids: list[list[int]] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: dict[str, dict[str, object]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    speculative: bool | None = None
    response_format: ResponseFormat | None = None


class NativeSampling(GrammarFields, kw_only=True):
    """``sampling_params`` of /generate under SGLang's names; null means the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    bad_words_ids: list[list[int]] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: dict[str, dict[str, object]] | None = None
    seed: int | None = None
    sampling_seed: int | None = None


def openai_params(
    body: OpenAIRequest,
    *,
    max_new_tokens: int,
    logprobs: int | None,
    defaults: Mapping[str, float | int],
) -> SamplingParams:
    """Parameters of an OpenAI request; ``defaults``: the model's own. Raises RefusedError."""
    fields = _direct(body)
    for name, value in defaults.items():
        fields.setdefault(name, value)
    fields |= {"max_new_tokens": max_new_tokens, "logprobs": logprobs}
    fields["grammar"] = grammar_of(body, body.response_format)
    if body.min_tokens is not None:
        fields["min_new_tokens"] = body.min_tokens
    return msgspec.convert(fields, SamplingParams)


def native_params(body: NativeSampling, logprobs: int | None, start: int) -> SamplingParams:
    """Parameters of a /generate request; ``start``: where the prompt's logprobs do, -1 for none.

    Raises RefusedError.
    """
    fields = _direct(body)
    if body.sampling_seed is not None:
        if body.seed is not None and body.seed != body.sampling_seed:
            raise RefusedError(
                Refused("sampling_params.sampling_seed", "differs from seed; give one of the two")
            )
        fields["seed"] = body.sampling_seed
    for name in ("max_new_tokens", "min_new_tokens"):
        if (value := getattr(body, name)) is not None:
            fields[name] = value
    fields["logprobs"] = logprobs
    fields["grammar"] = grammar_of(body, prefix="sampling_params.")
    if start != -1:
        fields |= {"prompt_logprobs": logprobs, "logprob_start_len": start}
    return msgspec.convert(fields, SamplingParams)


def _direct(body: OpenAIRequest | NativeSampling) -> dict[str, object]:
    """Fields that keep their name; those left out or null are absent."""
    values = {name: getattr(body, name) for name in _DIRECT}
    fields: dict[str, object] = {k: v for k, v in values.items() if v is not None}
    if body.stop is not None:
        fields["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    return fields


def openai_error(
    error: RefusedError, max_tokens_name: str = "max_tokens", prompt_name: str = "prompt"
) -> HttpError:
    """A refusal of the service, with the field under the name that the client sent."""
    refused = error.refused
    inside_to_sent = {inside: sent for sent, inside in OPENAI_NAMES.items()}
    inside_to_sent |= {"max_new_tokens": max_tokens_name, "prompt": prompt_name}
    field = inside_to_sent.get(refused.field, refused.field)
    reason = refused.reason.replace("max_new_tokens", max_tokens_name)
    return HttpError(refused.status, f"{field}: {reason}", param=field)


def request_ids(rid: str | list[str] | None, count: int, prefix: str = "") -> list[str]:
    """One id a prompt: given ones, ``<rid>_<i>`` for a batch with one id, or fresh ones."""
    if rid is None:
        return [prefix + new_rid() for _ in range(count)]
    if isinstance(rid, str):
        rids = [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]
    else:
        rids = rid
    if len(rids) != count:
        raise RefusedError(
            Refused("rid", f"has {len(rids)} ids for {count} prompts; give one each")
        )
    for one in rids:
        if not 1 <= len(one) <= 256:
            raise RefusedError(Refused("rid", "must have between 1 and 256 characters"))
    return rids
