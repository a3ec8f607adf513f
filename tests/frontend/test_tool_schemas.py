"""The schemas of forced calls: what they allow, and that references still point where they did."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.grammar_text import llguidance_grammar
from outrider.engine_core.refusal import RefusedError
from outrider.frontend.tool_calls.declared import Function
from outrider.frontend.tool_calls.schema import arguments_schema, calls_schema

BYTES = LLTokenizer("byte")
TREE: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "https://example.com/tree",
    "properties": {
        "$ref": {"const": "a property that is called so"},
        "root": {"$ref": "#/definitions/node"},
        "odd": {"enum": [{"$ref": "#/not/a/reference"}]},
    },
    "additionalProperties": False,
    "definitions": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/definitions/node"}, "all": {"$ref": "#"}},
            "additionalProperties": False,
        }
    },
}
FUNCTIONS = {
    "now": Function(name="now"),
    "tree": Function(name="tree", parameters=TREE),
    "any": Function(name="any", parameters={}),
}
GOOD = [
    "{}",
    '{"root":{}}',
    '{"root":{"left":{"left":{}},"all":{"root":{}}}}',
    '{"$ref":"a property that is called so","odd":{"$ref":"#/not/a/reference"}}',
]
BAD = ['{"root":{"right":{}}}', '{"root":1}', '{"root":{"all":{"x":1}}}', "[]", "1", "null"]


def accepts(schema: str, text: str) -> bool:
    grammar = llguidance_grammar(GrammarSpec("json_schema", schema))
    assert isinstance(grammar, str), grammar
    matcher = LLMatcher(BYTES, grammar)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def call(name: str, arguments: str) -> str:
    return f'{{"name":"{name}","arguments":{arguments}}}'


def test_arguments() -> None:
    schema = arguments_schema(FUNCTIONS["tree"], 0)
    assert all(accepts(schema, text) for text in GOOD)
    assert not any(accepts(schema, text) for text in BAD)
    assert accepts(arguments_schema(FUNCTIONS["now"], 0), "{}")
    assert not accepts(arguments_schema(FUNCTIONS["now"], 0), '{"a":1}')
    assert accepts(arguments_schema(FUNCTIONS["any"], 0), '{"a":[1]}')
    assert not accepts(arguments_schema(FUNCTIONS["any"], 0), "1")


@pytest.mark.parametrize("limit", [None, 1])
def test_an_array_of_calls(limit: int | None) -> None:
    before = repr(FUNCTIONS)
    schema = calls_schema(FUNCTIONS, limit)
    assert repr(FUNCTIONS) == before  # the template gets them as they came
    for text in GOOD:
        assert accepts(schema, f"[{call('tree', text)}]"), text
    for text in BAD:
        assert not accepts(schema, f"[{call('tree', text)}]"), text
    assert accepts(schema, f"[{call('now', '{}')}]")
    assert not accepts(schema, f"[{call('now', GOOD[1])}]")
    assert not accepts(schema, f"[{call('other', '{}')}]")
    assert not accepts(schema, "[]")
    assert not accepts(schema, '[{"name":"now"}]')
    two = f"[{call('now', '{}')},{call('any', GOOD[3])}]"
    assert accepts(schema, two) is (limit is None)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "array"}, 'must be of type object, got "array"'),
        ({"type": ["object", "null"]}, "must be of type object"),
        ({"const": "\ud800"}, "cannot be written as JSON"),
    ],
)
def test_what_are_no_parameters(parameters: Mapping[str, object], words: str) -> None:
    function = Function(name="f", parameters=dict(parameters))
    with pytest.raises(RefusedError) as caught:
        arguments_schema(function, 2)
    assert caught.value.refused.field == "tools[2].function.parameters"
    assert words in caught.value.refused.reason
    with pytest.raises(RefusedError, match=words.partition('"')[0]):
        calls_schema({"f": function}, None)


def test_what_the_schemas_say_of_all_json_moves_to_the_top() -> None:
    def function(name: str, guidance: object) -> Function:
        return Function(name=name, parameters={"maxLenght": 1, "x-guidance": guidance})

    lenient = {name: function(name, {"lenient": True}) for name in "fg"}
    assert accepts(calls_schema(lenient, None), f"[{call('g', '{}')}]")
    assert accepts(arguments_schema(lenient["f"], 0), "{}")
    for guidance in ({"lenient": False}, [1]):
        with pytest.raises(RefusedError, match="of h") as caught:
            calls_schema(lenient | {"h": function("h", guidance)}, None)
        assert caught.value.refused.field == "tools"


def referring(ref: str, target: dict[str, object], **top: object) -> Function:
    """A function whose argument ``a`` is ``target``, by a reference."""
    parameters = {
        "properties": {"a": {"$ref": ref}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"Z": target},
        **top,
    }
    return Function(name="g", parameters=parameters)


@pytest.mark.parametrize(
    ("ref", "own"),
    [
        ("#/$defs/Z", "http://e/x"),
        ("http://e/x#/$defs/Z", "http://e/x"),
        ("http://e/x#/$defs/Z", "http://e/x#"),
        ("x#/$defs/Z", "http://e/x"),
        ("x.json#/$defs/Z", "x.json"),
        ("#/$defs/Z", "urn:uuid:1"),
    ],
)
def test_references_by_the_own_id(ref: str, own: str) -> None:
    function = referring(ref, {"type": "integer"}, **{"$id": own})
    other = referring("#/$defs/Z", {"type": "string"}, **{"$id": own})
    both = {"f": msgspec.structs.replace(other, name="f"), "g": function}
    for schema, wrap in (
        (arguments_schema(function, 0), str),
        (calls_schema(both, None), lambda text: f"[{call('g', text)}]"),
    ):
        assert accepts(schema, wrap('{"a":1}'))
        assert not accepts(schema, wrap('{"a":"x"}'))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (referring("#A", {"$anchor": "A", "type": "integer"}), "$anchor"),
        (referring("#/$defs/Z", {"$anchor": "A"}), "$anchor"),
        (referring("#/$defs/Z", {"$dynamicAnchor": "A"}), "$dynamicAnchor"),
        (referring("#/$defs/Z", {"$dynamicRef": "#A"}), "$dynamicRef"),
        (referring("#/$defs/Z", {"$recursiveRef": "#"}), "$recursiveRef"),
        (referring("#/$defs/Z", {"$id": "http://e/sub"}), "$id"),
        (referring("http://e/y#/$defs/Z", {}, **{"$id": "http://e/x"}), "http://e/y"),
        (referring("http://[", {}, **{"$id": "http://e/x"}), "http://["),
        (referring("http://e/x#/b/Z", {}, **{"$id": "http://e/x", "b": {"Z": {"$anchor": "A"}}}),
         "$anchor"),
    ],
)  # fmt: skip
def test_references_that_would_mean_another_function_are_refused(
    function: Function, words: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        calls_schema({"f": Function(name="f"), "g": function}, None)
    refused = caught.value.refused
    assert (refused.field, refused.status) == ("tools[1].function.parameters", 400)
    assert words in refused.reason
    assert "#/$defs/name" in refused.reason


def test_a_function_alone_may_have_anchors() -> None:
    schema = arguments_schema(referring("#A", {"$anchor": "A", "type": "integer"}), 0)
    assert accepts(schema, '{"a":1}')
    assert not accepts(schema, '{"a":"x"}')
