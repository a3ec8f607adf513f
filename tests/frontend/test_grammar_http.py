"""Every HTTP field that asks for a grammar, and what reaches the core for it."""

import json

import openai
import pytest

from outrider.engine_core.grammar_spec import GrammarKind, GrammarSpec
from outrider.engine_core.refusal import Refused

from .live_server import LiveServer, post
from .test_grammars import ASKED, SCHEMA, TAG, TAG_TEXT, TRIGGERED

FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(SCHEMA)}}


def arrived(server: LiveServer) -> GrammarSpec | None:
    return server.core.requests[-1].params.grammar


@pytest.mark.parametrize(("fields", "kind", "text", "field"), ASKED)
def test_fields_of_both_apis(
    server: LiveServer, fields: dict[str, object], kind: GrammarKind, text: str, field: str
) -> None:
    for nulls in ({}, {"best_of": None, "structural_tag": None}):  # the second way of decoding
        body = {"prompt": "a", "max_tokens": 1, **nulls, **fields}
        assert post(server, "/v1/completions", body).status_code == 200
        assert arrived(server) == GrammarSpec(kind, text, field)
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1, **nulls, **fields}}
        assert post(server, "/generate", body).status_code == 200
        assert arrived(server) == GrammarSpec(kind, text, "sampling_params." + field)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"type": "text"}, None),
        ({}, None),
        (None, None),
        ({"type": "json_object"}, GrammarSpec("json_object", "", "response_format")),
        (
            FORMAT,
            GrammarSpec("json_schema", SCHEMA.replace(" ", ""), "response_format.json_schema"),
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}},
            GrammarSpec("json_schema", SCHEMA, "response_format.json_schema"),
        ),
        (
            {"type": "structural_tag", **TAG},
            GrammarSpec("structural_tag", TAG_TEXT, "response_format"),
        ),
        (
            {"type": "structural_tag", "format": TRIGGERED},
            GrammarSpec("structural_tag", TAG_TEXT, "response_format"),
        ),
    ],
)
def test_response_format(
    server: LiveServer,
    chat_server: LiveServer,
    asked: dict[str, object] | None,
    expected: GrammarSpec | None,
) -> None:
    body = {"prompt": "a", "max_tokens": 1, "response_format": asked, "suffix": ""}
    assert post(server, "/v1/completions", body).status_code == 200
    assert arrived(server) == expected
    message = {"role": "user", "content": "hi"}
    chat = {"messages": [message], "max_tokens": 1, "response_format": asked}
    assert post(chat_server, "/v1/chat/completions", chat).status_code == 200
    assert arrived(chat_server) == expected


def test_the_official_client(server: LiveServer, chat_server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(
            model="pycoder",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=1,
            response_format=FORMAT,  # type: ignore[call-overload, unused-ignore]
        )
        assert arrived(chat_server) is not None
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="pycoder",
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"guided_choice": ["a"], "response_format": {"type": "json_object"}},
            )
        assert caught.value.param == "response_format"


def test_every_prompt_and_sample_has_the_grammar(server: LiveServer) -> None:
    before = len(server.core.requests)
    body = {"prompt": ["a", "b"], "max_tokens": 1, "n": 2, "regex": "a"}
    assert post(server, "/v1/completions", body).status_code == 200
    sampling = [{"regex": "x", "max_new_tokens": 1}, {"max_new_tokens": 1}]
    assert post(server, "/generate", {"text": ["a", "b"], "sampling_params": sampling}).is_success
    new = [request.params.grammar for request in server.core.requests[before:]]
    assert new[:4] == [GrammarSpec("regex", "a", "regex")] * 4
    assert new[4:] == [GrammarSpec("regex", "x", "sampling_params.regex"), None]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
def test_what_the_core_refuses_keeps_its_field(
    server: LiveServer, path: str, body: dict[str, object], field: str
) -> None:
    server.core.refusal = Refused(field, "no text: of it")
    try:
        answer = post(server, path, body)
    finally:
        server.core.refusal = None
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (field, f"{field}: no text: of it")


def test_a_refusal_reaches_no_core(server: LiveServer) -> None:
    before = len(server.core.requests)
    schema = {"type": "array", "uniqueItems": True}
    for asked in (schema, json.dumps(schema)):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked}}
        answer = post(server, "/v1/completions", {"prompt": "a", "response_format": wanted})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "response_format.json_schema"
        assert "uniqueItems" in error["message"]
        assert "x-guidance" in error["message"]
    assert len(server.core.requests) == before
