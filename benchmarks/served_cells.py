"""The rows of the served matrix: what requests ask for each feature of the capability table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict
from served_answers import CHAT, COMPLETIONS, GENERATE, Ask

from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.doctor.prompts import PROMPTS as DOCTORS
from outrider.frontend.lossless.features import FEATURES, Known

TOKENS = 28
PROMPTS = tuple(DOCTORS[i] for i in (0, 4, 6, 8))
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
}
_REGEX = r"[a-z]{2,6}(, [a-z]{2,6}){2}"
_GBNF = 'root ::= item (" + " item){2}\nitem ::= [a-z]{1,3} "(" [0-9] ")"'
_CHOICES = ["yes, of course", "no, never", "not yet"]
_SPECIAL = 2  # <|im_end|>
_BY_NAME = {feature.name: feature.params for feature in FEATURES}
_DEFAULTS = asdict(SamplingParams())
_OPENAI = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
Asks = Callable[[Known], list[Ask]]


class Row(NamedTuple):
    """A feature of the table and the requests that ask for it.

    Each field of the feature changes an answer, or is in ``same``: then it must change none.
    ``free``: fields of which neither can be said. ``drafts``: whether these requests have any.
    """

    feature: str
    asks: Asks
    same: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    drafts: bool = True


def native(i: int, sampling: Mapping[str, object] | None = None, /, **fields: object) -> Ask:
    """/generate with a prompt, greedy unless ``sampling`` says otherwise."""
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


def _changed(params: SamplingParams) -> dict[str, Any]:
    """What is not a default, under SGLang's names."""
    found = {k: v for k, v in asdict(params).items() if v != _DEFAULTS[k] and k != "grammar"}
    found.setdefault("temperature", params.temperature)
    if params.grammar is not None:
        found[params.grammar.kind] = params.grammar.text
    return found


def _of(name: str, **fields: object) -> Asks:
    """The requests of a row of ``outrider check lossless``: native ones, and completions with a
    temperature, where that row is greedy. ``fields``: others, of both.
    """

    def asks(known: Known) -> list[Ask]:
        some = [_changed(_BY_NAME[name](known, i)) | fields for i in range(len(PROMPTS))]
        found = [native(i, sampling) for i, sampling in enumerate(some)]
        for i in (1, 3):
            drawn = {"seed": i, **some[i], "temperature": some[i]["temperature"] or 0.8}
            found.append(completion(i, **{_OPENAI.get(k, k): v for k, v in drawn.items()}))
        return found

    return asks


def _grammar(field: str, value: object, alias: str) -> Asks:
    """A grammar under two names, greedy and drawn."""

    def asks(known: Known) -> list[Ask]:
        found = [
            native(i, {name: value, "temperature": 0.8 * (i % 2), "seed": i})
            for i in range(len(PROMPTS))
            for name in (field if i < 2 else alias,)
        ]
        found += [completion(i, **{field: value, "seed": i, "temperature": 0.9}) for i in (0, 1)]
        return [*found, completion(2, **{alias: value}), chat(3, **{alias: value})]

    return asks


def _several(*asks: Ask) -> Asks:
    return lambda known: list(asks)


def _prompts(known: Known) -> list[Ask]:
    ids = [[int(token) for token in output] for output in known.greedy]
    several = {"text": list(PROMPTS), "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
    drawn = [{"temperature": 0.7, "seed": i, "max_new_tokens": 20 + i} for i in range(3)]
    return [
        native(0),
        completion(1),
        chat(2),
        Ask(GENERATE, several),
        Ask(GENERATE, {"input_ids": ids[0], "sampling_params": drawn[0]}),
        Ask(GENERATE, {"input_ids": ids[:3], "sampling_params": drawn}),
        completion(0, prompt=ids),
    ]


def _seeds(known: Known) -> list[Ask]:
    return [
        *(native(i, {"temperature": 1.0, "seed": 7 + i}) for i in range(3)),
        *(native(i, {"temperature": 1.2, "sampling_seed": 70 + i}) for i in range(3)),
        completion(0, temperature=1.0, seed=-5),
        chat(1, temperature=1.0, seed=5),
    ]


def _samples(known: Known) -> list[Ask]:
    return [
        native(0, {"n": 3, "temperature": 0.9, "seed": 3}),
        completion(1, n=3, temperature=0.9, seed=4),
        chat(2, n=2, temperature=0.9, seed=5),
        native(3, {"n": 2}),
    ]


def _stops(known: Known) -> list[Ask]:
    texts = [known.text(output) for output in known.greedy]
    return [
        *_of("stop string")(known),
        native(0, {"stop": [texts[0][7:9], texts[0][11:16]]}),
        completion(1, stop=texts[1][9:12]),
        completion(2, stop=[texts[2][13:18], "\ufffd"], temperature=0.5, seed=1),
        chat(3, stop=["e", "\n\n"]),
    ]


def _trims(known: Known) -> list[Ask]:
    stop = known.text(known.greedy[0])[10:14]
    special = {"logit_bias": {str(_SPECIAL): 12.0}, "temperature": 0.8, "seed": 1}
    return [
        native(0, {"stop": stop, "no_stop_trim": True}),
        native(0, {"stop": stop, "include_stop_str_in_output": True}),
        completion(0, stop=stop, include_stop_str_in_output=True),
        completion(0, stop=stop, no_stop_trim=True),
        chat(1, stop=["e"], include_stop_str_in_output=True),
        native(1, {"skip_special_tokens": False, **special}),
        completion(1, skip_special_tokens=False, **special),
    ]


def _max_tokens(known: Known) -> list[Ask]:
    return [
        *_of("max tokens")(known),
        native(1, {"max_new_tokens": 23, "temperature": 0.6, "seed": 0}),
        completion(2, max_tokens=17),
        chat(0, max_completion_tokens=9),
        Ask(CHAT, {**chat(1).without("max_completion_tokens").body, "max_tokens": 11}),
    ]


def _logprobs(known: Known) -> list[Ask]:
    return [
        *(native(i, {"temperature": 0.8 * (i % 2), "seed": i}, return_logprob=True)
          for i in range(4)),
        native(0, None, return_logprob=True, return_text_in_logprobs=True),
        completion(1, logprobs=0, temperature=0.7, seed=2, repetition_penalty=1.2),
        completion(2, logprobs=3),
        chat(3, logprobs=True),
    ]  # fmt: skip


def _top_logprobs(known: Known) -> list[Ask]:
    return [
        *(native(i, {"temperature": 0.8 * (i % 2), "seed": i}, return_logprob=True,
                 top_logprobs_num=1 + 2 * i) for i in range(4)),
        native(0, {"regex": _REGEX}, return_logprob=True, top_logprobs_num=3),
        chat(1, logprobs=True, top_logprobs=4),
        chat(2, logprobs=True, top_logprobs=2, temperature=1.0, seed=4, stream=True),
    ]  # fmt: skip


def _prompt_logprobs(known: Known) -> list[Ask]:
    return [
        native(0, None, return_logprob=True, logprob_start_len=0, top_logprobs_num=2),
        native(1, None, return_logprob=True, logprob_start_len=5),
        native(2, {"n": 2, "temperature": 0.8, "seed": 1}, return_logprob=True,
               logprob_start_len=3, stream=True),
        completion(2, prompt_logprobs=2, temperature=0.7, seed=2),
        completion(3, prompt_logprobs=0, logprobs=2),
        chat(3, prompt_logprobs=1),
    ]  # fmt: skip


def _echo(known: Known) -> list[Ask]:
    return [
        completion(0, echo=True),
        completion(1, echo=True, logprobs=2, temperature=0.8, seed=1),
        completion(2, echo=True, logprobs=1, stream=True),
        completion(3, echo=True, logprobs=0, max_tokens=0),
    ]


def _best_of(known: Known) -> list[Ask]:
    return [
        completion(i, n=2, best_of=4, temperature=1.0, seed=i, logprobs=i or None) for i in range(3)
    ]


def _ids(known: Known) -> list[Ask]:
    return [completion(0), completion(1, stream=True), completion(2, n=2, temperature=1, seed=1),
            chat(3), chat(0, stream=True)]  # fmt: skip


def _structured(known: Known) -> list[Ask]:
    asked: list[dict[str, object]] = [
        {"json": _SCHEMA},
        {"regex": _REGEX},
        {"choice": _CHOICES},
        {"grammar": _GBNF},
        {"json_object": True},
    ]
    return [
        *(completion(i % 4, structured_outputs=one) for i, one in enumerate(asked)),
        *(native(i % 4, {"structured_outputs": one, "temperature": 0.9, "seed": i})
          for i, one in enumerate(asked)),
        chat(0, structured_outputs=asked[0], stream=True),
    ]  # fmt: skip


def _formats(known: Known) -> list[Ask]:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    return [
        completion(0, response_format=schema),
        completion(1, response_format=schema, temperature=0.9, seed=1, n=2),
        completion(2, response_format={"type": "json_object"}),
        chat(3, response_format=schema),
        chat(0, response_format={"type": "json_object"}, stream=True),
        chat(1, response_format={"type": "text"}),
    ]


def _streams(known: Known) -> list[Ask]:
    usage = {"include_usage": True}
    return [
        native(0, None, stream=True),
        native(1, {"temperature": 0.8, "seed": 1, "n": 2}, stream=True, return_logprob=True),
        completion(1, stream=True),
        completion(2, stream=True, stream_options=usage, logprobs=1, temperature=0.8, seed=1),
        completion(3, stream=True, stop=known.text(known.greedy[3])[10:15]),
        chat(2, stream=True),
        chat(3, stream=True, stream_options=usage, temperature=0.8, seed=3, n=2),
    ]


def _both(**fields: object) -> list[Ask]:
    """A field of the top level with each endpoint."""
    return [native(0, None, **fields), native(1, {"temperature": 0.8, "seed": 3}, **fields),
            completion(2, **fields), chat(3, **fields)]  # fmt: skip


def _rids(known: Known) -> list[Ask]:
    return [native(0, None, rid="r-native"), completion(1, rid="r-completion"),
            chat(2, rid="r-chat"), native(3, {"n": 2}, rid="r-two")]  # fmt: skip


def _priorities(known: Known) -> list[Ask]:
    return [ask for level in (0, 3, 30) for ask in _both(priority=level)]


def _salts(known: Known) -> list[Ask]:
    return [*_both(cache_salt="one"), *_both(cache_salt="two"), *_both()]


def _labels(known: Known) -> list[Ask]:
    return [completion(0, user="u", metadata={"a": "b"}), chat(1, user="u"),
            completion(2, safety_identifier="s"), chat(3, metadata={"a": "b"})]  # fmt: skip


def _greedy(known: Known) -> list[Ask]:
    return [*_of("greedy")(known)[:4], native(0, {"top_k": 1, "temperature": 1.0}),
            completion(1), chat(2)]  # fmt: skip


ROWS = (
    Row("prompt", _prompts, free=frozenset({"prompt", "messages", "text", "input_ids"})),
    Row("model name", _several(completion(0), chat(1, model="pycoder")), frozenset({"model"})),
    Row("request id", _rids, frozenset({"rid"})),
    Row("greedy", _greedy),
    Row("temperature", _of("temperature")),
    Row("top_k", _of("top_k")),
    Row("top_p", _of("top_p")),
    Row("min_p", _of("min_p")),
    Row("seed", _seeds),
    Row("n", _samples),
    Row("stop strings", _stops),
    Row("stop_token_ids", _of("stop ids")),
    Row("trimming", _trims),
    Row("max tokens", _max_tokens, free=frozenset({"max_completion_tokens"})),
    Row("min tokens", _of("min tokens")),
    Row("ignore_eos", _of("ignore_eos")),
    Row("logprobs", _logprobs),
    Row("top_logprobs", _top_logprobs),
    Row("prompt_logprobs", _prompt_logprobs),
    Row("echo", _echo),
    Row("best_of", _best_of),
    Row("token ids in answers", _ids),
    Row("presence_penalty", _of("presence_penalty")),
    Row("frequency_penalty", _of("frequency_penalty")),
    Row("repetition_penalty", _of("repetition_penalty")),
    Row("logit_bias", _of("logit_bias")),
    Row("bad_words", lambda known: [*_of("bad_words")(known), *_bad_words(known)]),
    Row("allowed_token_ids", _of("allowed_token_ids")),
    Row("json_schema", _grammar("json_schema", _SCHEMA, "guided_json")),
    Row("json_object", _grammar("guided_json_object", True, "guided_json_object")),
    Row("regex", _grammar("regex", _REGEX, "guided_regex")),
    Row("ebnf", _grammar("ebnf", _GBNF, "guided_grammar")),
    Row("choice", _grammar("guided_choice", _CHOICES, "guided_choice")),
    Row("structured_outputs", _structured),
    Row("response_format", _formats),
    Row("streaming", _streams, frozenset({"stream"})),
    Row("priority", _priorities, frozenset({"priority"})),
    Row("cache_salt", _salts, frozenset({"cache_salt"})),
    Row(
        "speculation switch",
        lambda known: _both(speculative=False),
        frozenset({"speculative"}),
        drafts=False,
    ),
    Row("native sampling", lambda known: _of("sampling together")(known)[:4]),
    Row("client labels", _labels, frozenset({"user", "metadata", "safety_identifier"})),
)


def _bad_words(known: Known) -> list[Ask]:
    words = sorted({word for word in known.text(known.greedy[0]).split() if word.isalpha()})
    return [native(0, {"bad_words": words[:4]}), completion(0, bad_words=words[:4])]


# What the issue of these features names as the least, for every kind of drafter.
LEAST = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
         "repetition_penalty", "logit_bias", "max tokens", "min tokens", "stop strings",
         "stop_token_ids", "logprobs", "top_logprobs", "json_schema")  # fmt: skip

# Values of fields that are refused whatever they hold; "x" for those not named.
_VALUES: dict[str, object] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "functions": [{"name": "f"}],
    "beam_width": 4,
    "prediction": {"type": "content", "content": "x"},
    "add_special_tokens": False,
}


def refused_asks(fields: Sequence[str]) -> list[Ask]:
    """Two requests for each field that is refused, to two endpoints."""
    asked = [{field: _VALUES.get(field, "x")} for field in fields]
    return [ask for one in asked for ask in (native(0, one), completion(1, **one))]


def empty_known() -> Known:
    """What stands for a model's greedy outputs where only the names of fields matter."""
    output = tuple(range(10, 10 + TOKENS))
    return Known([output] * len(PROMPTS), TOKENS, lambda tokens: "abcdefgh " * len(tokens), (0,))


def greedy_asks() -> list[Ask]:
    """The requests whose output ids ``Known`` holds."""
    return [native(i, {"max_new_tokens": TOKENS}) for i in range(len(PROMPTS))]
