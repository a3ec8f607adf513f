"""Keywords of a JSON Schema: known ones pass wherever a schema stands, others are named."""

import pytest

from outrider.engine_core.grammar_keywords import check_keywords

WRONG: dict[str, object] = {"type": "string", "maxLenght": 3}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (WRONG, "#/maxLenght"),
        ({"properties": {"a": WRONG}}, "#/properties/a/maxLenght"),
        ({"patternProperties": {"^a": WRONG}}, "#/patternProperties/^a/maxLenght"),
        ({"$defs": {"a": WRONG}}, "#/$defs/a/maxLenght"),
        ({"definitions": {"a": WRONG}}, "#/definitions/a/maxLenght"),
        ({"dependentSchemas": {"a": WRONG}}, "#/dependentSchemas/a/maxLenght"),
        ({"items": WRONG}, "#/items/maxLenght"),
        ({"items": [{}, WRONG]}, "#/items/1/maxLenght"),
        ({"prefixItems": [True, WRONG]}, "#/prefixItems/1/maxLenght"),
        ({"additionalProperties": WRONG}, "#/additionalProperties/maxLenght"),
        ({"anyOf": [WRONG]}, "#/anyOf/0/maxLenght"),
        ({"oneOf": [WRONG]}, "#/oneOf/0/maxLenght"),
        ({"allOf": [{"not": WRONG}]}, "#/allOf/0/not/maxLenght"),
        ({"if": {}, "then": WRONG}, "#/then/maxLenght"),
        ({"if": {}, "else": WRONG}, "#/else/maxLenght"),
        ({"x-shared": {"a": WRONG}, "$ref": "#/x-shared/a"}, "#/x-shared/a/maxLenght"),
    ],
)
def test_an_unknown_keyword_is_named_with_its_place_and_the_nearest(
    schema: dict[str, object], path: str
) -> None:
    with pytest.raises(ValueError, match='did you mean "maxLength"') as caught:
        check_keywords(schema)
    assert f'"{path}" is no keyword' in str(caught.value)
    assert '"x-guidance": {"lenient": true}' in str(caught.value)
    check_keywords({**schema, "x-guidance": {"lenient": True}})
    with pytest.raises(ValueError, match="maxLenght"):
        check_keywords({**schema, "x-guidance": {"lenient": False}})


def test_near_and_far_names() -> None:
    with pytest.raises(ValueError, match=r'"#/requird".*did you mean "required"'):
        check_keywords({"requird": ["a"]})
    with pytest.raises(ValueError, match="#/foo") as caught:
        check_keywords({"foo": 1})
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ValueError, match="nn") as caught:
        check_keywords({"properties": {"a\n" + "m" * 60_000: {"n" * 10: 1}}})
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "s", "$id": "i", "$comment": "c", "title": "t", "description": "d"},
        {"default": {"foo": 1}, "examples": [{"foo": 1}], "readOnly": True, "deprecated": True},
        {"const": {"foo": 1}},
        {"enum": [{"foo": 1}]},
        {"format": "date", "contentEncoding": "base64", "contentMediaType": "text/plain"},
        {"x-order": {"foo": 1}, "properties": {"foo": {"x-y": 1}, "items": {}}},
        {"properties": {"foo": True}, "required": ["foo"], "additionalProperties": False},
        {"$ref": "#/nowhere"},
        {"$ref": "#", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"uniqueItems": True, "dependencies": {"a": ["foo"]}},  # llguidance's to refuse
    ],
)
def test_what_is_known_or_no_schema_passes(schema: dict[str, object]) -> None:
    check_keywords(schema)


def test_x_guidance_stands_at_the_top() -> None:
    with pytest.raises(ValueError, match="stand at the top"):
        check_keywords({"items": {"x-guidance": {"lenient": True}}})
