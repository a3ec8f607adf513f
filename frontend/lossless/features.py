"""The rows of the matrix: what a request of each feature asks for.

Parameters are made from what greedy decoding gives, so that stops, biases and lengths fall inside
the output and not where nothing would notice them.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ...engine_core.grammar_spec import GrammarKind, GrammarSpec
from ...engine_core.sampling_params import SamplingParams

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
_REGEX = r"[a-z]{2,8}(_[a-z]{2,8}){0,3} = [0-9]{1,4}"
_EBNF = """root ::= sum
sum ::= term (" + " term)*
term ::= [a-z] [0-9] | "(" sum ")"
"""
_CHOICES = ["return the first value", "return the last value", "raise an error"]


class Known(NamedTuple):
    """What a row may choose by. ``greedy``: plain outputs by prompt, at most ``tokens`` long.

    ``text``: of some tokens. ``eos_ids``: tokens that end an output by themselves.
    """

    greedy: list[tuple[int, ...]]
    tokens: int
    text: Callable[[Sequence[int]], str]
    eos_ids: tuple[int, ...]


class Feature(NamedTuple):
    """One row: ``params(known, i)`` are those of prompt i."""

    name: str
    params: Callable[[Known, int], SamplingParams]


def base(tokens: int) -> SamplingParams:
    """Greedy decoding of so many tokens, what all rows vary."""
    return SamplingParams(temperature=0.0, max_new_tokens=tokens)


def _greedy(**fields: object) -> Callable[[Known, int], SamplingParams]:
    return lambda known, _: replace(base(known.tokens), **fields)


def _seeded(temperature: float, **fields: object) -> Callable[[Known, int], SamplingParams]:
    return lambda known, i: replace(
        base(known.tokens), temperature=temperature, seed=i + 1, **fields
    )


def _grammar(kind: GrammarKind, text: str) -> Callable[[Known, int], SamplingParams]:
    return _greedy(grammar=GrammarSpec(kind, text, field=kind))


def _biases(known: Known, i: int) -> dict[int, float]:
    """What greedy decoding says most often is forbidden, and the runner-up made likelier."""
    said = [token for token, _ in Counter(known.greedy[i]).most_common(2)]
    return dict(zip(said, (-100.0, 2.0), strict=False))


def _biased(known: Known, i: int) -> SamplingParams:
    return replace(base(known.tokens), logit_bias=_biases(known, i))


def _together(known: Known, i: int) -> SamplingParams:
    return replace(
        _biased(known, i),
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        min_p=0.01,
        seed=1000 + i,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
    )


def _words(known: Known, i: int) -> tuple[tuple[int, ...], ...]:
    """A token of the greedy output, and two that follow each other there."""
    output = known.greedy[i]
    third = len(output) // 3
    words = (output[third : third + 1], output[2 * third : 2 * third + 2])
    return tuple(word for word in words if word)


def _bad_words(known: Known, i: int) -> SamplingParams:
    return replace(base(known.tokens), bad_words_ids=_words(known, i))


def _allowed(known: Known, _: int) -> SamplingParams:
    """Two thirds of what greedy decoding says are allowed, and the end."""
    said = sorted({token for output in known.greedy for token in output})
    allowed = {token for i, token in enumerate(said) if i % 3 < 2}.union(known.eos_ids)
    return replace(base(known.tokens), allowed_token_ids=tuple(sorted(allowed)))


def _token(known: Known, i: int, share: float) -> tuple[int, ...]:
    """The greedy output's token at a share of its length, if there is one."""
    output = known.greedy[i]
    at = int(share * len(output))
    return output[at : at + 1]


def _min_tokens(known: Known, i: int) -> SamplingParams:
    return replace(
        base(known.tokens),
        min_new_tokens=known.tokens // 2,
        stop_token_ids=_token(known, i, 0.1),
    )


def _bans_together(known: Known, i: int) -> SamplingParams:
    """By each rule of acceptance: what greedy decoding says is forbidden, or ends the output."""
    return replace(
        base(known.tokens),
        temperature=0.9,
        seed=2000 + i,
        bad_words_ids=_words(known, i),
        min_new_tokens=min(3, known.tokens),
        stop_token_ids=_token(known, i, 0.1),
        presence_penalty=0.5,
    )


def _max_tokens(known: Known, i: int) -> SamplingParams:
    return replace(base(known.tokens), max_new_tokens=min(1 + i % 9, known.tokens))


def _stop_string(known: Known, i: int) -> SamplingParams:
    """A stop string that begins and ends within tokens, wherever the text allows that."""
    output = known.greedy[i]
    third = len(output) // 3
    text = known.text(output[third : third + 3])
    stop = text[1:-1] if len(text) > 3 else text
    usable = stop and "\ufffd" not in stop
    return replace(base(known.tokens), stop=(stop if usable else "e",))


def _stop_ids(known: Known, i: int) -> SamplingParams:
    return replace(base(known.tokens), stop_token_ids=_token(known, i, 0.4))


def _ignore_eos(known: Known, i: int) -> SamplingParams:
    """The end of the text is made likely, so that there is something to ignore."""
    bias = dict.fromkeys(known.eos_ids, 6.0)
    return replace(base(known.tokens), ignore_eos=True, logit_bias=bias)


def processed(calls: dict[str, dict[str, object]]) -> tuple[Feature, ...]:
    """The rows of custom logits processors with these arguments."""
    return (
        Feature("logits_processors", _greedy(logits_processors=calls)),
        Feature("logits_processors, temperature", _seeded(0.8, logits_processors=calls)),
    )


FEATURES = (
    Feature("greedy", _greedy()),
    Feature("temperature", _seeded(0.8)),
    Feature("top_k", _seeded(1.0, top_k=8)),
    Feature("top_p", _seeded(1.0, top_p=0.9)),
    Feature("min_p", _seeded(1.0, min_p=0.05)),
    Feature("presence_penalty", _greedy(presence_penalty=1.0)),
    Feature("frequency_penalty", _greedy(frequency_penalty=0.7)),
    Feature("repetition_penalty", _greedy(repetition_penalty=1.2)),
    Feature("logit_bias", _biased),
    Feature("bad_words", _bad_words),
    Feature("allowed_token_ids", _allowed),
    Feature("sampling together", _together),
    Feature("bans together", _bans_together),
    Feature("min tokens", _min_tokens),
    Feature("max tokens", _max_tokens),
    Feature("stop string", _stop_string),
    Feature("stop ids", _stop_ids),
    Feature("ignore_eos", _ignore_eos),
    Feature("logprobs", _greedy(logprobs=5)),
    Feature("prompt_logprobs", _greedy(prompt_logprobs=2)),
    Feature("n = 2", _seeded(0.8, n=2)),
    Feature("json_schema", _grammar("json_schema", json.dumps(_SCHEMA))),
    Feature("json_object", _grammar("json_object", "")),
    Feature("regex", _grammar("regex", _REGEX)),
    Feature("regex, temperature", _seeded(0.8, grammar=GrammarSpec("regex", _REGEX, "regex"))),
    Feature("ebnf", _grammar("ebnf", _EBNF)),
    Feature("choice", _grammar("choice", json.dumps(_CHOICES))),
)
