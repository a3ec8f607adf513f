"""The rows of the served matrix: what requests ask for each feature of the capability table."""

from collections.abc import Sequence
from typing import NamedTuple

import served_calls as calls
import served_outputs as outputs
from served_answers import CHAT, GENERATE, Ask
from served_asks import (
    CHOICES,
    GBNF,
    PROMPTS,
    REGEX,
    SCHEMA,
    TOKENS,
    Asks,
    chat,
    completion,
    everywhere,
    grammar,
    lossless,
    mixtures,
    native,
)

from outrider.frontend.lossless.features import Known

_SPECIAL = {"logit_bias": {"2": 30.0}, "temperature": 0.8, "seed": 1}  # draws <|im_end|>


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


def _prompts(known: Known) -> list[Ask]:
    ids = [list(output) for output in known.greedy]
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


def _rids(known: Known) -> list[Ask]:
    return [
        native(0, None, rid="r-native"),
        completion(1, rid="r-completion"),
        chat(2, rid="r-chat"),
        native(3, {"n": 2}, rid="r-two"),
    ]


def _greedy(known: Known) -> list[Ask]:
    alone = {"top_k": 1, "temperature": 1.0}
    return [*map(native, range(4)), native(0, alone), completion(1), chat(2)]


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
        *lossless("stop string")(known),
        native(0, {"stop": [texts[0][7:9], texts[0][11:16]]}),
        completion(1, stop=texts[1][9:12]),
        completion(2, stop=[texts[2][13:18], "\ufffd"], temperature=0.5, seed=1),
        chat(3, stop=["e", "\n\n"]),
    ]


def _trims(known: Known) -> list[Ask]:
    stop = known.text(known.greedy[0])[10:14]
    return [
        native(0, {"stop": stop, "no_stop_trim": True}),
        native(0, {"stop": stop, "include_stop_str_in_output": True}),
        completion(0, stop=stop, include_stop_str_in_output=True),
        completion(0, stop=stop, no_stop_trim=True),
        chat(1, stop=["e"], include_stop_str_in_output=True),
        native(1, {"skip_special_tokens": False, **_SPECIAL}),
        completion(1, skip_special_tokens=False, **_SPECIAL),
    ]


def _max_tokens(known: Known) -> list[Ask]:
    return [
        *lossless("max tokens")(known),
        native(1, {"max_new_tokens": 23, "temperature": 0.6, "seed": 0}),
        completion(2, max_tokens=17),
        chat(0, max_completion_tokens=9),
        Ask(CHAT, {**chat(1).without("max_completion_tokens").body, "max_tokens": 11}),
    ]


def _past_the_end(known: Known) -> list[Ask]:
    likely = {"ignore_eos": True, "logit_bias": {str(known.eos_ids[0]): 9.0}}
    return [
        *(native(i, {**likely, "temperature": 0.9 * (i % 2), "seed": i}) for i in range(4)),
        completion(0, **likely),
        chat(1, **likely),
    ]


def _bad_words(known: Known) -> list[Ask]:
    words = sorted({word for word in known.text(known.greedy[0]).split() if word.isalpha()})
    return [
        *lossless("bad_words")(known),
        native(0, {"bad_words": words[:4]}),
        completion(0, bad_words=words[:4]),
    ]


def _choices(known: Known) -> list[Ask]:
    """One is what greedy decoding writes for a prompt, so that drafters know it."""
    written = sorted({known.text(output[:20]) for output in known.greedy})
    return grammar("guided_choice", [*written, *CHOICES], "guided_choice")(known)


def _processors(known: Known) -> list[Ask]:
    calls = [{"logits_processors": {"Unlike": {"back": back}}} for back in (1, 2, 5)]
    return [
        *(native(i, {**calls[i], "temperature": 0.8 * (i % 2), "seed": i}) for i in range(3)),
        completion(0, **calls[1]),
        chat(1, **calls[2]),
    ]


def _structured(known: Known) -> list[Ask]:
    asked: list[dict[str, object]] = [
        {"json": SCHEMA},
        {"regex": REGEX},
        {"choice": CHOICES},
        {"grammar": GBNF},
        {"json_object": True},
    ]
    drawn = [{"structured_outputs": one, "temperature": 0.9, "seed": 1} for one in asked]
    return [
        *(completion(i % 4, structured_outputs=one) for i, one in enumerate(asked)),
        *(native(i % 4, sampling) for i, sampling in enumerate(drawn)),
        chat(0, structured_outputs=asked[0], stream=True),
    ]


def _formats(known: Known) -> list[Ask]:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return [
        completion(0, response_format=schema),
        completion(1, response_format=schema, temperature=0.9, seed=1, n=2),
        completion(2, response_format={"type": "json_object"}),
        chat(3, response_format=schema),
        chat(0, response_format={"type": "json_object"}, stream=True),
        chat(1, response_format={"type": "text"}),
    ]


def _schemas(known: Known) -> list[Ask]:
    """Also of a text of its own length, in which draft models guess right now and then."""
    text = {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
        "additionalProperties": False,
    }
    some = [native(i, {"json_schema": text}) for i in range(len(PROMPTS))]
    return grammar("json_schema", SCHEMA, "guided_json")(known) + some


def _priorities(known: Known) -> list[Ask]:
    return [ask for level in (0, 3, 30) for ask in everywhere(priority=level)]


def _salts(known: Known) -> list[Ask]:
    return [*everywhere(cache_salt="one"), *everywhere(cache_salt="two"), *everywhere()]


def _labels(known: Known) -> list[Ask]:
    return [
        completion(0, user="u", metadata={"a": "b"}),
        chat(1, user="u"),
        completion(2, safety_identifier="s"),
        chat(3, metadata={"a": "b"}),
    ]


ROWS = (
    Row("prompt", _prompts, free=frozenset(("prompt", "messages", "text", "input_ids"))),
    Row(
        "model name", lambda known: [completion(0), chat(1, model="pycoder")], frozenset(("model",))
    ),
    Row("request id", _rids, frozenset(("rid",))),
    Row("greedy", _greedy),
    Row("temperature", lossless("temperature")),
    Row("top_k", lossless("top_k")),
    Row("top_p", lossless("top_p")),
    Row("min_p", lossless("min_p")),
    Row("seed", _seeds),
    Row("n", _samples),
    Row("stop strings", _stops),
    Row("stop_token_ids", lossless("stop ids")),
    Row("trimming", _trims),
    Row("max tokens", _max_tokens, free=frozenset(("max_completion_tokens",))),
    Row("min tokens", lossless("min tokens")),
    Row("ignore_eos", _past_the_end),
    Row("logprobs", outputs.logprobs),
    Row("top_logprobs", outputs.top_logprobs),
    Row("prompt_logprobs", outputs.prompt_logprobs),
    Row("echo", outputs.echo),
    Row("best_of", outputs.best_of),
    Row("token ids in answers", outputs.ids),
    Row("presence_penalty", lossless("presence_penalty")),
    Row("frequency_penalty", lossless("frequency_penalty")),
    Row("repetition_penalty", lossless("repetition_penalty")),
    Row("logit_bias", lossless("logit_bias")),
    Row("bad_words", _bad_words),
    Row("allowed_token_ids", lossless("allowed_token_ids")),
    Row("custom logits processors", _processors),
    Row("json_schema", _schemas),
    Row("json_object", grammar("guided_json_object", True, "guided_json_object")),
    Row("regex", grammar("regex", REGEX, "guided_regex")),
    Row("ebnf", grammar("ebnf", GBNF, "guided_grammar")),
    Row("choice", _choices),
    Row("structural_tag", calls.structural_tags),
    Row("structured_outputs", _structured),
    Row("response_format", _formats),
    Row("tools", calls.tools),
    Row("tool_choice", calls.tool_choice),
    Row("parallel_tool_calls", calls.parallel),
    Row("streaming", outputs.streams, frozenset(("stream",))),
    Row("priority", _priorities, frozenset(("priority",))),
    Row("cache_salt", _salts, frozenset(("cache_salt",))),
    Row(
        "speculation switch",
        lambda known: everywhere(speculative=False),
        frozenset(("speculative",)),
        drafts=False,
    ),
    Row("native sampling", lambda known: lossless("sampling together")(known)[:4]),
    Row("client labels", _labels, frozenset(("user", "metadata", "safety_identifier"))),
    # No row of the table: what features do to each other.
    Row("several at once", mixtures(1, 40)),
)

# The least that must be shown for every kind of drafter whenever the tests run.
LEAST = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "max tokens", "min tokens", "stop strings",
    "stop_token_ids", "logprobs", "top_logprobs", "json_schema",
)  # fmt: skip

# Values of fields that are refused; "x" for those not named.
_VALUES: dict[str, object] = {
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
    return [native(i) for i in range(len(PROMPTS))]
