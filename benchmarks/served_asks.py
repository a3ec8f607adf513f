"""Makers of requests for the served matrix: endpoints, rows of the lossless check, mixtures."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import asdict
from served_answers import CHAT, COMPLETIONS, GENERATE, Ask

from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.doctor.prompts import PROMPTS as DOCTORS
from outrider.frontend.lossless.features import FEATURES, Known

TOKENS = 28
PROMPTS = tuple(DOCTORS[i] for i in (0, 4, 6, 8))
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
REGEX = r"[a-z]{2,6}(, [a-z]{2,6}){2}"
GBNF = 'root ::= item (" + " item){2}\nitem ::= [a-z]{1,3} "(" [0-9] ")"'
CHOICES = ["yes, of course", "no, never", "not yet"]
_GRAMMARS: tuple[dict[str, object], ...] = (
    {"json_schema": SCHEMA},
    {"regex": REGEX},
    {"ebnf": GBNF},
    {"guided_choice": CHOICES},
    {"guided_json_object": True},
)
_BY_NAME = {feature.name: feature.params for feature in FEATURES}
_DEFAULTS = asdict(SamplingParams())
_OPENAI = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
Asks = Callable[[Known], list[Ask]]


def native(i: int, sampling: Mapping[str, object] | None = None, /, **fields: object) -> Ask:
    """/generate with prompt i, greedy unless ``sampling`` says otherwise."""
    params = {"temperature": 0, "max_new_tokens": TOKENS, **(sampling or {})}
    return Ask(GENERATE, {"text": PROMPTS[i], "sampling_params": params, **fields})


def completion(i: int, /, **fields: object) -> Ask:
    """/v1/completions, likewise."""
    body = {"model": "pycoder", "prompt": PROMPTS[i], "temperature": 0, "max_tokens": TOKENS}
    return Ask(COMPLETIONS, {**body, "return_token_ids": True, **fields})


def chat(i: int, /, **fields: object) -> Ask:
    """/v1/chat/completions, likewise."""
    body: dict[str, object] = {"messages": [{"role": "user", "content": PROMPTS[i]}]}
    body |= {"temperature": 0, "max_completion_tokens": TOKENS, "return_token_ids": True}
    return Ask(CHAT, body | fields)


def everywhere(**fields: object) -> list[Ask]:
    """Fields of the top level, at each endpoint."""
    return [
        native(0, None, **fields),
        native(1, {"temperature": 0.8, "seed": 3}, **fields),
        completion(2, **fields),
        chat(3, **fields),
    ]


def lossless(name: str) -> Asks:
    """The requests of a row of ``outrider check lossless``: natively, and as completions, which
    have a temperature where that row is greedy.
    """

    def asks(known: Known) -> list[Ask]:
        some = [_changed(_BY_NAME[name](known, i)) for i in range(len(PROMPTS))]
        drawn = [{"seed": 1, **one, "temperature": one["temperature"] or 0.8} for one in some]
        found = [native(i, some[i]) for i in range(3)]
        return found + [completion(i, **_renamed(drawn[i])) for i in (2, 3)]

    return asks


def _changed(params: SamplingParams) -> dict[str, Any]:
    """What is not a default, under SGLang's names."""
    found = {k: v for k, v in asdict(params).items() if v != _DEFAULTS[k]}
    assert "grammar" not in found, "its notation is the field's name: see grammar()"
    return {"temperature": params.temperature, **found}


def _renamed(sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {_OPENAI.get(name, name): value for name, value in sampling.items()}


def grammar(field: str, value: object, alias: str) -> Asks:
    """A grammar under two names, greedy and drawn."""

    def asks(known: Known) -> list[Ask]:
        return [
            native(0, {field: value}),
            native(1, {field: value, "temperature": 0.8, "seed": 1}),
            native(2, {alias: value, "temperature": 0.8, "seed": 2}),
            completion(0, **{field: value, "temperature": 0.9, "seed": 3}),
            completion(1, **{field: value}, stream=True),
            completion(2, **{alias: value}, logprobs=1),
            chat(3, **{alias: value}),
        ]

    return asks


def mixtures(seed: int, count: int) -> Asks:
    """Requests of many features at once, drawn at random among those that go together."""

    def asks(known: Known) -> list[Ask]:
        rng = random.Random(seed)
        return [_mixture(known, rng) for _ in range(count)]

    return asks


def _mixture(known: Known, rng: random.Random) -> Ask:
    i = rng.randrange(len(PROMPTS))
    sampling = _mixed_sampling(known.greedy[i], known.text(known.greedy[i]), rng)
    top = rng.choice((None, None, 0, 3))
    fields: dict[str, object] = {"stream": rng.random() < 0.3, "priority": rng.choice((0, 0, 5))}
    if rng.random() < 0.5:
        if top is not None:
            fields |= {"return_logprob": True, "top_logprobs_num": top}
            fields["logprob_start_len"] = rng.choice((-1, 0, 4))
        return native(i, sampling, **fields)
    fields |= {"logprobs": top, "echo": rng.random() < 0.3}
    return completion(i, **fields, **_renamed(sampling))


def _mixed_sampling(said: tuple[int, ...], text: str, rng: random.Random) -> dict[str, Any]:
    """``said``: greedy output of the prompt, its ``text``."""
    most = rng.randint(1, TOKENS)
    sampling: dict[str, Any] = {"max_new_tokens": most}

    def perhaps(chance: float, **fields: object) -> None:
        if rng.random() < chance:
            sampling.update(fields)

    perhaps(0.6, temperature=rng.choice((0.3, 0.8, 1.0, 1.5)), seed=rng.randrange(1000))
    perhaps(0.2, top_k=rng.choice((1, 2, 40)))
    perhaps(0.2, top_p=rng.choice((0.5, 0.95)))
    perhaps(0.2, min_p=rng.choice((0.02, 0.3)))
    perhaps(0.25, presence_penalty=rng.choice((-0.5, 0.8)))
    perhaps(0.25, frequency_penalty=rng.choice((-0.3, 0.6)))
    perhaps(0.25, repetition_penalty=rng.choice((0.9, 1.3)))
    bias = {str(rng.choice(said)): rng.choice((-100.0, -2.0, 3.0)), "0": rng.choice((0.0, 5.0))}
    perhaps(0.3, logit_bias=bias)
    at = rng.randrange(max(1, len(text) - 4))
    perhaps(0.25, stop=[text[at : at + rng.randint(1, 4)] or "e", "\n\n"])
    perhaps(0.15, stop_token_ids=[rng.choice(said)])
    perhaps(0.2, no_stop_trim=True)
    perhaps(0.2, include_stop_str_in_output=True)
    perhaps(0.3, n=rng.randint(2, 3))
    if rng.random() < 0.4:
        return sampling | rng.choice(_GRAMMARS)
    perhaps(0.3, min_new_tokens=rng.randint(0, most))
    perhaps(0.2, ignore_eos=True)
    cut = rng.randrange(len(said))
    perhaps(0.3, bad_words_ids=[list(said[cut : cut + 1]), list(said[: rng.randint(1, 3)])])
    perhaps(0.15, allowed_token_ids=sorted({*said[::2], 0, 5, 300 + cut}))
    return sampling
