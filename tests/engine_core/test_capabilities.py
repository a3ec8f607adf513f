"""The capability table: complete, consistent with the APIs, and the source of its page."""

from pathlib import Path

import msgspec
import pytest

from outrider.engine_core.capabilities import (
    capability_table,
    is_neutral,
    is_supported,
    misplaced_field,
    refuse_field,
    refuse_unsupported,
    to_json,
    to_markdown,
    without_neutral,
)
from outrider.engine_core.capability import DRAFTERS
from outrider.engine_core.capability_table import NEUTRAL, REFUSED, SUPPORTED
from outrider.engine_core.drafter_spec import BUILT_IN
from outrider.engine_core.sampling_params import SamplingParams

DOCS = Path(__file__).parents[2] / "docs" / "capabilities.md"


def test_the_page_is_current() -> None:
    assert DOCS.read_text() == to_markdown(), "write it again: outrider capabilities > that file"


def test_json_is_the_table() -> None:
    rows = msgspec.json.decode(to_json(), type=list[dict[str, object]])
    assert [row["feature"] for row in rows] == [row.feature for row in capability_table()]
    assert all(row["none"] in ("exact", "refused") for row in rows)


def test_no_field_stands_twice_and_every_refusal_says_why() -> None:
    fields = [name for row in capability_table() for name in row.fields]
    assert len(fields) == len(set(fields))
    features = [row.feature for row in capability_table()]
    assert len(features) == len(set(features))
    assert all(len(row.note) >= 7 for row in REFUSED)
    assert all({row.none, *row.drafters} == {"exact"} for row in SUPPORTED)
    assert all({row.none, *row.drafters} == {"refused"} for row in REFUSED)
    assert set(NEUTRAL) <= set(fields)


def test_every_sampling_parameter_is_in_the_table() -> None:
    for name in SamplingParams.__struct_fields__:
        assert is_supported(name) or name == "grammar", name  # it has a row a notation


@pytest.mark.parametrize(
    "feature",
    [
        "greedy", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop strings",
        "stop_token_ids", "min tokens", "max tokens", "ignore_eos", "logprobs", "top_logprobs",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "streaming",
        "priority", "cache_salt", "json_schema", "json_object", "regex", "ebnf", "choice",
        "structured_outputs", "structural_tag", "response_format", "bad_words", "allowed_token_ids",
        "prompt_logprobs", "echo", "best_of", "tools", "tool_choice", "parallel_tool_calls",
    ],
)  # fmt: skip
def test_promised_features_are_exact_with_every_drafter(feature: str) -> None:
    row = next(row for row in capability_table() if row.feature == feature)
    assert (row.none, *row.drafters) == ("exact",) * 7


def test_every_built_in_drafter_has_a_column() -> None:
    assert set(DRAFTERS.values()) == set(BUILT_IN)
    row = capability_table()[0]
    assert row.drafters == tuple(getattr(row, name) for name in DRAFTERS)


REFUSALS: list[tuple[str, object]] = [
    ("guided_decoding_backend", "xgrammar"),
    ("guided_whitespace_pattern", " ?"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("use_beam_search", True),
    ("beam_width", 4),
    ("lora_path", "adapter"),
    ("image_data", "data:"),
    ("audio_data", "data:"),
    ("video_data", "data:"),
    ("modalities", ["text", "audio"]),
    ("input_embeds", [[0.1]]),
    ("return_hidden_states", True),
    ("suffix", "tail"),
    ("custom_logit_processor", "code"),
    ("stop_regex", "a"),
    ("session_params", {"id": "1"}),
    ("watermark", True),
    ("bootstrap_host", "host"),
    ("bootstrap_room", 0),
    ("add_special_tokens", False),
    ("service_tier", "flex"),
    ("prediction", {"type": "content", "content": "x"}),
]


@pytest.mark.parametrize(("field", "value"), REFUSALS)
def test_what_is_not_supported_is_refused_by_name(field: str, value: object) -> None:
    refused = refuse_unsupported({"prompt": "x", "n": 2, field: value})
    assert refused is not None
    assert (refused.field, refused.status) == (field, 400)
    assert "not supported" in refused.reason
    assert field in without_neutral({field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 1), ("best_of", 1.0), ("echo", False), ("tools", []),
        ("functions", None), ("guided_decoding_backend", "auto"), ("tool_choice", "auto"),
        ("parallel_tool_calls", True), ("suffix", ""), ("logprob_start_len", -1),
        ("modalities", ["text"]), ("use_beam_search", False), ("add_special_tokens", True),
        ("custom_params", {}), ("typical_p", 1), ("lora_path", None),
        ("guided_whitespace_pattern", ""),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_fine(field: str, value: object) -> None:
    assert refuse_unsupported({field: value}) is None
    assert is_neutral(field, value)
    assert without_neutral({"top_p": 0.5, field: value}) == {"top_p": 0.5}


def test_labels_of_the_client_change_nothing() -> None:
    labels: dict[str, object] = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s"}
    assert refuse_unsupported(labels) is None
    assert without_neutral(labels) == {}


@pytest.mark.parametrize("value", [None, 1, "x", [], False])
def test_unknown_fields_are_refused_even_when_empty(value: object) -> None:
    refused = refuse_unsupported({"temprature": value})
    assert refused is not None
    assert (refused.field, refused.status) == ("temprature", 400)
    assert "unknown" in refused.reason
    assert without_neutral({"temprature": value}) == {"temprature": value}


def test_a_supported_field_in_the_wrong_place_is_not_called_unknown() -> None:
    assert "not here" in refuse_field("messages").reason
    places = (("", ("text", "input_ids")), ("sampling_params.", ("min_new_tokens", "top_k")))
    for field, remedy in (
        ("messages", "use text or input_ids instead"),
        ("min_tokens", "use sampling_params.min_new_tokens instead"),
        ("top_k", "use sampling_params.top_k instead"),
        ("top_logprobs", "not by this endpoint; leave it out"),
    ):
        assert remedy in str(misplaced_field(field, places))
    assert misplaced_field("no_such_field", places) is None
    assert misplaced_field("functions", places) is None
    assert refuse_unsupported({"messages": [], "stop": None, "seed": 3}) is None
