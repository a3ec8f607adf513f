"""Grammars in loose values and on command lines: one for a request, under its field's name."""

import argparse
import json
from pathlib import Path

import pytest

from outrider import GrammarSpec, SamplingParams
from outrider.engine_core.grammar_spec import GrammarKind
from outrider.engine_core.grammar_text import MAX_GRAMMAR_BYTES
from outrider.engine_core.refusal import RefusedError
from outrider.frontend.client_messages import ClientGenerate, decode_to_gateway, encode
from outrider.frontend.flags import UsageError
from outrider.frontend.sampling_flags import add_sampling_flags, params_from, params_from_flags

SCHEMA = '{"type": "object", "properties": {"b": {"const": null}, "a": {}}}'
GBNF = 'root ::= "a"+'

TAG = {
    "structures": [{"begin": "<a>", "schema": {"type": "null"}, "end": "</a>"}],
    "triggers": ["<a>"],
}
CONTENT = {"type": "json_schema", "json_schema": {"type": "null"}}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<a>"],
    "tags": [{"type": "tag", "begin": "<a>", "content": CONTENT, "end": "</a>"}],
}
TAG_TEXT = (
    '{"structures":[{"begin":"<a>","schema":{"type":"null"},"end":"</a>"}],"triggers":["<a>"],'
    '"at_least_one":false,"stop_after_first":false}'
)

# (the request's fields, kind, text, the field that errors name)
ASKED: list[tuple[dict[str, object], GrammarKind, str, str]] = [
    ({"json_schema": SCHEMA}, "json_schema", SCHEMA, "json_schema"),
    (
        {"json_schema": json.loads(SCHEMA)},
        "json_schema",
        SCHEMA.replace(" ", ""),
        "json_schema",
    ),
    ({"json_schema": {}}, "json_schema", "{}", "json_schema"),
    ({"regex": "a+"}, "regex", "a+", "regex"),
    ({"ebnf": GBNF}, "ebnf", GBNF, "ebnf"),
    ({"guided_json": {"type": "null"}}, "json_schema", '{"type":"null"}', "guided_json"),
    ({"guided_regex": "é"}, "regex", "é", "guided_regex"),
    ({"guided_choice": ["é", '"']}, "choice", '["é","\\""]', "guided_choice"),
    ({"guided_grammar": GBNF}, "ebnf", GBNF, "guided_grammar"),
    ({"guided_json_object": True}, "json_object", "", "guided_json_object"),
    (
        {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
        "json_schema",
        "{}",
        "structured_outputs.json",
    ),
    ({"structured_outputs": {"regex": "a"}}, "regex", "a", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]', "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": GBNF}}, "ebnf", GBNF, "structured_outputs.grammar"),
    (
        {"structured_outputs": {"json_object": True}},
        "json_object",
        "",
        "structured_outputs.json_object",
    ),
    ({"structural_tag": json.dumps(TAG)}, "structural_tag", TAG_TEXT, "structural_tag"),
    (
        {"structural_tag": {"type": "structural_tag", **TAG}},
        "structural_tag",
        TAG_TEXT,
        "structural_tag",
    ),
    (
        {"structural_tag": {"type": "structural_tag", "format": TRIGGERED}},
        "structural_tag",
        TAG_TEXT,
        "structural_tag",
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps({"format": TRIGGERED})}},
        "structural_tag",
        TAG_TEXT,
        "structured_outputs.structural_tag",
    ),
]


@pytest.mark.parametrize(("fields", "kind", "text", "field"), ASKED)
def test_each_field_becomes_the_grammar(
    fields: dict[str, object], kind: GrammarKind, text: str, field: str
) -> None:
    params = params_from({"top_k": 3, **fields})
    assert params == SamplingParams(top_k=3, grammar=GrammarSpec(kind, text, field))


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": None, "regex": "", "guided_json_object": False, "grammar": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": "", "json_object": False, "choice": None}},
        {"guided_decoding_backend": "auto", "guided_whitespace_pattern": None, "ebnf": ""},
    ],
)
def test_what_asks_for_nothing_is_no_grammar(fields: dict[str, object]) -> None:
    assert params_from(fields) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"json_schema": "{}", "regex": "a"}, "regex", "json_schema"),
        ({"regex": "a", "guided_regex": "a"}, "guided_regex", "give one of the two"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", ""),
        ({"regex": "a", "grammar": GrammarSpec("regex", "b")}, "grammar", "regex"),
        ({"grammar": {"kind": "regex", "text": "a"}}, "grammar", "GrammarSpec"),
        ({"grammar": GBNF}, "grammar", "ebnf"),
        ({"guided_choice": []}, "guided_choice", "at least one string"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]", "str"),
        ({"guided_choice": "a"}, "guided_choice", "array"),
        ({"json_schema": 5}, "json_schema", "str"),
        ({"json_schema": "{"}, "json_schema", "JSON"),
        ({"json_schema": {"type": object()}}, "json_schema", "cannot be written as JSON"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema", "cannot be written as JSON"),
        ({"regex": "\ud800"}, "regex", "surrogate"),
        ({"regex": "("}, "regex", "unclosed"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex", str(MAX_GRAMMAR_BYTES)),
        ({"ebnf": "nothing"}, "ebnf", "GBNF or Lark"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "unknown"),
        ({"structural_tag": "x"}, "structural_tag", "triggered_tags"),
        ({"structural_tag": {}}, "structural_tag", "needs structures and triggers"),
        ({"structural_tag": {"format": TRIGGERED, **TAG}}, "structural_tag", "beside structures"),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "structural_tag", "triggered_tags"),
        ({"structural_tag": {**TAG, "triggers": ["b"]}}, "structural_tag", "none of the triggers"),
        ({"structural_tag": {**TAG, "type": "xml"}}, "structural_tag", "xml"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "llguidance"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "x-guidance"),
    ],
)
def test_what_is_no_grammar_is_refused(fields: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(RefusedError) as caught:
        params_from(fields)
    assert caught.value.refused.field == field
    assert words in caught.value.refused.reason
    assert caught.value.refused.status == 400


def test_a_grammar_of_python_stands_and_fields_override_it() -> None:
    base = SamplingParams(grammar=GrammarSpec("regex", "a", "mine"))
    assert params_from({"top_k": 1}, base).grammar == base.grammar
    assert params_from({"regex": None}, base).grammar == base.grammar
    assert params_from({"regex": "b"}, base).grammar == GrammarSpec("regex", "b", "regex")
    assert params_from({"grammar": base.grammar}).grammar == base.grammar
    with pytest.raises(RefusedError, match="mine"):
        params_from({"grammar": GrammarSpec("regex", "(", "mine")})


@pytest.mark.parametrize(
    ("kind", "text", "field", "words"),
    [
        ("foo", "x", "f", "wrong kind"),
        (None, "x", "f", "wrong kind"),
        ("regex", 5, "f", "wrong text"),
        ("regex", "x", 5, "wrong field"),
    ],
)
def test_a_spec_of_wrong_types_is_refused_where_it_enters(
    kind: GrammarKind, text: str, field: str, words: str
) -> None:
    spec = GrammarSpec(kind, text, field)
    for values, base in (({"grammar": spec}, None), ({}, SamplingParams(grammar=spec))):
        with pytest.raises(RefusedError, match=words) as caught:
            params_from(values, base)
        assert caught.value.refused.field == "grammar"
        assert "json_schema, json_object, regex" in caught.value.refused.reason


def test_a_long_text_is_left_to_the_core() -> None:
    long = "(" + "a" * 20_000
    assert params_from({"regex": long}).grammar == GrammarSpec("regex", long, "regex")


def test_grammars_cross_the_wire_of_the_sdk() -> None:
    params = params_from({"guided_choice": ["yes", "no"]})
    sent = ClientGenerate(rid="r", text="x", token_ids=b"", params=params)
    assert decode_to_gateway(encode(sent)) == sent


@pytest.mark.parametrize(
    ("other", "field"),
    [({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 2}, "min_new_tokens")],
)
def test_what_would_pass_the_end_of_a_grammar_is_refused(
    other: dict[str, object], field: str
) -> None:
    refused = params_from({"guided_regex": "a", **other}).refuse(100)
    assert refused is not None
    assert refused.field == field
    assert "guided_regex" in refused.reason


def flags(*args: str) -> GrammarSpec | None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    add_sampling_flags(parser)
    return params_from_flags(parser.parse_args(args)).grammar


def test_flags_take_a_grammar_in_place_or_in_a_file(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(SCHEMA)
    grammar.write_text('start: "é"')
    assert flags("--json") is None
    of_schema = GrammarSpec("json_schema", SCHEMA, "json_schema")
    assert flags("--json", "--json-schema", SCHEMA) == of_schema
    assert flags("--json-schema", str(schema)) == of_schema
    assert flags("--regex", "a|b") == GrammarSpec("regex", "a|b", "regex")
    assert flags("--ebnf", GBNF) == GrammarSpec("ebnf", GBNF, "ebnf")
    assert flags("--ebnf", str(grammar)) == GrammarSpec("ebnf", 'start: "é"', "ebnf")
    assert flags("--choice", "a", "--choice", "b") == GrammarSpec("choice", '["a","b"]', "choice")


def test_flags_name_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    for flag, value, words in (
        ("--json-schema", str(tmp_path / "none"), "--json-schema: cannot read"),
        ("--json-schema", str(binary), "utf-8"),
        ("--ebnf", "grammar.gbnf", "--ebnf: cannot read"),
        ("--ebnf", "x" * 5000, "--ebnf: cannot read"),
        ("--ebnf", "\0", "--ebnf: cannot read"),
    ):
        with pytest.raises(UsageError, match=words):
            flags(flag, value)
    for flag, value, words in (
        ("--json-schema", '{"type": 5}', "json_schema: "),
        ("--regex", "(", "regex: "),
    ):
        with pytest.raises(RefusedError, match=words):
            flags(flag, value)
    with pytest.raises(RefusedError, match="ignore_eos: regex"):
        flags("--regex", "a", "--ignore-eos")
    with pytest.raises(SystemExit):
        flags("--regex", "a", "--choice", "b")
    assert "--choice: not allowed with argument --regex" in capsys.readouterr().err
