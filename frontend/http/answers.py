"""Parts of OpenAI answers that completions and chat share."""

import math
from collections.abc import Sequence

import msgspec

from ...engine_core.messages import FinishReason
from ...engine_core.refusal import Refused, RefusedError
from ..service import Delta
from .errors import HttpError


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that the radix cache already held."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of an answer; a prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET


class UsageCounter:
    """Sums the usage of all sequences of one request."""

    def __init__(self, count: int, n: int) -> None:
        self._n = n
        self._prompt = [0] * count
        self._cached = [0] * count
        self._completion = [0] * (count * n)
        self._cached_known = False

    def add(self, delta: Delta) -> None:
        """Take one delta's counts."""
        meta = delta.meta_info
        prompt = delta.index // self._n
        self._prompt[prompt] = meta.prompt_tokens
        self._completion[delta.index] = meta.completion_tokens
        if isinstance(meta.cached_tokens, int):
            self._cached[prompt] = max(self._cached[prompt], meta.cached_tokens)
            self._cached_known = True

    def total(self) -> Usage:
        """Usage so far."""
        prompt, completion = sum(self._prompt), sum(self._completion)
        details = PromptTokensDetails(cached_tokens=sum(self._cached))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=details if self._cached_known else msgspec.UNSET,
        )


def raise_if_failed(delta: Delta) -> None:
    """Raise for a sequence that the core ended with an error: RefusedError when the core's
    message starts with the field at fault, HttpError otherwise.
    """
    finish = delta.finish
    if finish is None or finish.kind != "abort" or finish.status < 400:
        return
    message = finish.message or "the request failed in the engine"
    field, colon, reason = message.partition(": ")
    if colon and all(part.isidentifier() for part in field.split(".")):
        raise RefusedError(Refused(field, reason, finish.status))
    raise HttpError(finish.status, message)


def matched_stop(finish: FinishReason | None) -> int | str | None:
    """The stop token id or stop string that ended a sequence."""
    return finish.matched if finish is not None else None


class Collected:
    """All of one sequence, for answers that are not streamed."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        """Append one delta."""
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.deltas.append(delta)

    @property
    def last(self) -> Delta:
        """The delta with the finish."""
        return self.deltas[-1]

    def joined(self) -> str:
        """The whole text."""
        return "".join(self.text)


def collect(deltas: Sequence[Delta], count: int) -> list[Collected]:
    """Group deltas by sequence."""
    sequences = [Collected() for _ in range(count)]
    for delta in deltas:
        sequences[delta.index].add(delta)
    return sequences


def best_samples(sequences: Sequence[Collected], drawn: int, kept: int) -> list[Collected]:
    """Of every ``drawn`` samples of a prompt the ``kept`` likeliest by mean log-probability."""
    found: list[Collected] = []
    for first in range(0, len(sequences), drawn):
        samples = sequences[first : first + drawn]
        found += sorted(samples, key=_mean_logprob, reverse=True)[:kept]
    return found


def _mean_logprob(sequence: Collected) -> float:
    values = [entry.value for delta in sequence.deltas for entry in delta.logprobs]
    return sum(values) / len(values) if values else -math.inf
