"""Grammars in llguidance's notation: each kind accepts its texts and no others, or is refused."""

import time

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.engine_core.grammar_depth import MAX_DEPTH, schema_depth
from outrider.engine_core.grammar_spec import GrammarKind, GrammarSpec
from outrider.engine_core.grammar_text import (
    MAX_GRAMMAR_BYTES,
    grammar_refusal,
    llguidance_grammar,
)
from outrider.engine_core.refusal import Refused

BYTES = LLTokenizer("byte")  # every byte is a token


def compiled(kind: GrammarKind, text: str) -> str:
    grammar = llguidance_grammar(GrammarSpec(kind, text))
    assert isinstance(grammar, str), grammar
    return grammar


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


POINT = (
    '{"type":"object","properties":{"x":{"type":"integer"},"y":{"enum":["a","é"]}},'
    '"required":["x","y"],"additionalProperties":false}'
)
SUM = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", POINT, ['{"x":-3,"y":"é"}'], ['{"x": 1,"y":"a"}', '{"x":1}', "[]", ""]),
        ("json_schema", "{}", ["1", '"a"', "[1,{}]", "null"], ["[1, 2]", "x", ""]),
        (
            "json_schema",
            '{"type":"object","x-guidance":{"whitespace_flexible":true}}',
            ['{"a": 1}'],
            ["1"],
        ),
        (
            "json_schema",
            '{"type":"object","x-guidance":{"whitespace_pattern":" ?"}}',
            ['{"a": 1}', '{ "a":1 }'],
            ['{"a":  1}'],
        ),
        (
            "json_schema",
            '{"uniqueItems":true,"type":"array","x-guidance":{"lenient":true}}',
            ["[1,1]"],
            ["1"],
        ),
        (
            "json_schema",
            '{"oneOf":[{"type":"string"},{"minLength":3,"type":"string"}],'
            '"x-guidance":{"coerce_one_of":true}}',
            ['"a"'],
            ["1"],
        ),
        ("json_object", "", ["{}", '{"a":[1]}'], ["[]", "{} ", '{"a": 1}']),
        ("regex", r"\d{3}-[a-c]+", ["123-abc"], ["123-", "x123-a"]),
        ("regex", "^(yes|no)$", ["yes", "no"], ["yesno", "maybe", ""]),
        ("regex", 'a/b"\\n', ['a/b"\n'], ["a/b"]),
        ("regex", "é+", ["éé"], ["e"]),
        ("choice", '["a", "ab", "abc"]', ["a", "ab", "abc"], ["", "b", "abcd"]),
        ("choice", '["😀 é", "q\\"\\\\\\n"]', ["😀 é", 'q"\\\n'], ["q"]),
        ("choice", '["", "x"]', ["", "x"], ["xx"]),
        ("ebnf", SUM, ["1", "(1+2)+33"], ["1+", "()", ""]),
        ("ebnf", 'root ::= ("a"\n  | "b")\n', ["a", "b"], ["ab"]),
        ("ebnf", "start: NUMBER\nNUMBER: /[0-9]+/", ["7"], ["", "x"]),
        ("ebnf", 'root ::= "\\u00e9\\x41" [\\u0061-\\u0063\\u005d]', ["éAb", "éA]"], ["éAd"]),
        ("ebnf", 'root ::= "\\\\u0041" | "\\u0022\\u000a"', ["\\u0041", '"\n'], ["A"]),
        ("ebnf", 'root ::= "\\U0001f600" | [a\\u002dc]', ["😀", "-", "c"], ["b"]),
    ],
)
def test_a_grammar_accepts_its_texts_only(
    kind: GrammarKind, text: str, good: list[str], bad: list[str]
) -> None:
    grammar = compiled(kind, text)
    assert [one for one in good if not accepts(grammar, one)] == []
    assert [one for one in bad if accepts(grammar, one)] == []


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type"', "JSON Schema"),
        ("json_schema", "", "JSON Schema"),
        ("json_schema", "true", "{} allows any JSON value"),
        ("json_schema", '{"type":"bogus"}', "Invalid type: bogus"),
        ("json_schema", '{"uniqueItems":true,"type":"array"}', "x-guidance"),
        ("json_schema", '{"type":"string","format":"bogus"}', '"lenient": true'),
        (
            "json_schema",
            '{"oneOf":[{"type":"string"},{"type":"string","maxLength":3}]}',
            '"coerce_one_of": true',
        ),
        ("json_schema", '{"$ref":"#/$defs/x"}', "does not exist"),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "recursion"),
        (
            "json_schema",
            '{"x-guidance":{"foo":1}}',
            "`whitespace_pattern`, `coerce_one_of`, `lenient`",
        ),
        ("json_schema", '{"x-guidance":{"foo":1}}', 'these are the fields of "x-guidance"'),
        ("json_schema", '{"x-guidance":{"lenient":1}}', 'in "x-guidance"; correct it'),
        ("json_schema", '{"x-guidance":3}', '"x-guidance" must be an object'),
        (
            "json_schema",
            '{"x-guidance":{"whitespace_pattern":"(a"}}',
            'unclosed group in the regular expression (a of "x-guidance" whitespace_pattern',
        ),
        ("json_schema", '{"type":"string","pattern":"("}', 'of "pattern" or "patternProperties"'),
        ("json_schema", '{"type":"string","pattern":"\\\\b"}', r"leave out \b"),
        ("regex", "(", "unclosed group"),
        ("regex", r"\bfoo", r"leave out \b and \B"),
        ("regex", "(?m)a$b", "and ^ and $ within"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", r"\bfoo", "lookarounds not supported"),
        ("ebnf", "", "GBNF or Lark"),
        ("ebnf", "root ::= missing", "'missing' not found"),
        ("ebnf", 'root ::= start\nstart ::= "a"', "'start' already exists"),
        ("ebnf", 'root ::= "a', "Unexpected end"),
        ("ebnf", "root ::= " + "(" * 900 + '"a"' + ")" * 900, "recursion"),
        ("ebnf", 'root ::= "\\ud800"', "write the character itself"),
        ("ebnf", "start: missing", 'unknown name: "missing"'),
        ("choice", "[]", "at least one string"),
        ("choice", "[1]", "Expected `str`"),
        ("choice", '"a"', "Expected `array`"),
        ("choice", '["\\ud800"]', "list of strings"),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_field(
    kind: GrammarKind, text: str, words: str
) -> None:
    refused = llguidance_grammar(GrammarSpec(kind, text, "guided"))
    assert isinstance(refused, Refused)
    assert (refused.field, refused.status) == ("guided", 400)
    assert words in refused.reason
    assert "\n" not in refused.reason
    assert len(refused.reason) < 500


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", r"a{3}[^\s\S]", "no text is of this grammar"),
        ("ebnf", 'start: a\na: a "x"', "no text is of this grammar"),
        ("ebnf", "start: <|nope|>", 'at 1(8): unknown special token: "<|nope|>"'),
    ],
)
def test_what_a_matcher_says_becomes_a_sentence(kind: GrammarKind, text: str, words: str) -> None:
    spec = GrammarSpec(kind, text, "guided")
    matcher = LLMatcher(BYTES, compiled(kind, text), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    assert matcher.is_error()
    refused = grammar_refusal(spec, matcher.get_error())
    assert refused.field == "guided"
    assert words in refused.reason
    assert "\n" not in refused.reason


def test_a_text_is_neither_too_long_nor_half_a_character() -> None:
    long = llguidance_grammar(GrammarSpec("regex", "é" * (MAX_GRAMMAR_BYTES // 2 + 1)))
    assert isinstance(long, Refused)
    assert str(MAX_GRAMMAR_BYTES) in long.reason
    assert isinstance(llguidance_grammar(GrammarSpec("regex", "é" * 1000)), str)
    half = llguidance_grammar(GrammarSpec("regex", "\ud800"))
    assert isinstance(half, Refused)
    assert "surrogate" in half.reason


def lark_chain(rules: int) -> str:
    links = "".join(f"r{i}: r{i + 1}\n" for i in range(rules))
    return f'start: r0\n{links}r{rules}: "a"'


def gbnf_chain(rules: int) -> str:
    links = "".join(f"r{i} ::= r{i + 1}\n" for i in range(rules))
    return f'root ::= r0\n{links}r{rules} ::= "a"'


def schema_chain(length: int) -> str:
    defs: dict[str, object] = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)
    }
    defs[f"d{length}"] = {"type": "integer"}
    return msgspec.json.encode({"$defs": defs, "$ref": "#/$defs/d0"}).decode()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ebnf", lark_chain(MAX_DEPTH - 3)),
        ("ebnf", gbnf_chain(MAX_DEPTH - 3)),
        ("json_schema", schema_chain(MAX_DEPTH // 3 - 4)),
    ],
)
def test_chains_up_to_the_limit_leave_the_process_alive(kind: GrammarKind, text: str) -> None:
    matcher = LLMatcher(BYTES, compiled(kind, text))
    assert not matcher.is_error(), matcher.get_error()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ebnf", lark_chain(4000)),
        ("ebnf", gbnf_chain(2500)),
        ("ebnf", "start: " + "(" * 5000),
        ("json_schema", schema_chain(1000)),
    ],
)
def test_what_would_end_the_process_is_refused(kind: GrammarKind, text: str) -> None:
    assert len(text) < MAX_GRAMMAR_BYTES
    refused = llguidance_grammar(GrammarSpec(kind, text))
    assert isinstance(refused, Refused)
    assert f"the limit is {MAX_DEPTH}" in refused.reason


def test_the_fields_of_x_guidance_are_no_remedy_for_one_of() -> None:
    refused = llguidance_grammar(GrammarSpec("json_schema", '{"x-guidance":{"foo":1}}'))
    assert isinstance(refused, Refused)
    assert '"coerce_one_of": true' not in refused.reason


def test_many_spellings_of_a_reference_cost_no_more_than_the_schema() -> None:
    spelled = [
        "".join(f"%{ord(c):02x}" if i >> bit & 1 else c for bit, c in enumerate("abcdefghijk"))
        for i in range(1100)
    ]
    target: dict[str, object] = {"enum": list(range(12_000))}
    refs = [{"$ref": f"#/$defs/{name}"} for name in spelled]
    document = {"$defs": {"abcdefghijk": target}, "anyOf": refs}
    started = time.perf_counter()
    assert schema_depth(document) > MAX_DEPTH
    assert time.perf_counter() - started < 0.1
    nested: dict[str, object] = target
    for _ in range(30):
        nested = {"a": nested}
    places = [{"$ref": "#/x" + "/a" * depth} for depth in range(30)]
    started = time.perf_counter()
    # The document, x, 30 of a, enum, its values; each place is one less deep, its reference one.
    assert schema_depth({"x": nested, "y": places}) == 33 + sum(33 - down for down in range(30))
    assert time.perf_counter() - started < 0.1


def test_depth_follows_references_once() -> None:
    assert schema_depth({}) == 0
    assert schema_depth({"type": "integer"}) == 1
    assert schema_depth({"items": {"items": {"type": "integer"}}}) == 3
    node: dict[str, object] = {"properties": {"next": {"$ref": "#/$defs/node"}}}
    document: dict[str, object] = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    assert schema_depth(node["properties"]) == 2 + 3  # what cannot be found counts as everything
    assert schema_depth(document) == 5 + 4
    assert schema_depth({"$ref": "#"}) == 1
    assert schema_depth({"a/b": [{"c~": {}}], "$ref": "#/a~1b/0/c~0"}) == 3 + 1
    assert schema_depth({"$ref": "elsewhere"}) == 1 + 2
