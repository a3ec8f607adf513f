"""Served calls keep to their schemas, plainly and with n-gram drafts, streamed or not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ..frontend.fake_core import MODEL
from ..frontend.server_process import ServerProcess, real_server

pytestmark = pytest.mark.serial
TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
)
ITEM = {
    "type": "object",
    "properties": {"value": {"enum": [1, 2]}, "next": {"enum": [None, "é"]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
PERSON = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 3}},
    "required": ["items"],
    "additionalProperties": False,
    "$defs": {"item": ITEM},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add_person", "parameters": PERSON}},
    {"type": "function", "function": {"name": "push", "parameters": LIST, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
ASK = [{"role": "user", "content": "Add Ann, who is 12, and push a list. 🙂"}]


def is_item(item: dict[str, object]) -> bool:
    return (
        list(item) == ["value", "next"] and item["value"] in (1, 2) and item["next"] in (None, "é")
    )


def holds(name: str, arguments: object) -> bool:
    """Whether arguments are of the function's schema."""
    match name, arguments:
        case "now", {**rest}:
            return not rest
        case "add_person", {"name": str(who), "age": int(age), **rest}:
            return len(who) <= 8 and 0 <= age <= 120 and not rest
        case "push", {"items": [*items], **rest}:
            return len(items) <= 3 and not rest and all(map(is_item, items))
    return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """pycoder with a chat template, and tokens for the tags of calls as Qwen's models have."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    for token, text in zip(
        tokenizer["added_tokens"][-2:], ("<tool_call>", "</tool_call>"), strict=True
    ):
        del tokenizer["model"]["vocab"][token["content"]]
        tokenizer["model"]["vocab"][text] = token["id"]
        token |= {"content": text, "special": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_bytes((MODEL / "tokenizer_config.json").read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = ("--speculative-algorithm", "NGRAM", "--tool-call-parser", "hermes")
    with real_server(*flags, "--tokenizer-path", str(folder)) as running:
        yield running


def answers(server: ServerProcess, stream: bool, **fields: object) -> list[dict[str, Any]]:
    """Content, calls without their ids, and finish reason of each sample."""
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 200, "stream": stream, **fields}
    url = server.url + "/v1/chat/completions"
    if not stream:
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return [
            {
                "content": choice["message"]["content"] or "",
                "calls": [call["function"] for call in choice["message"].get("tool_calls", [])],
                "finish": choice["finish_reason"],
            }
            for choice in answer.json()["choices"]
        ]
    found: dict[int, dict[str, Any]] = {}
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    for line in lines:
        [part] = json.loads(line)["choices"]
        one = found.setdefault(part["index"], {"content": "", "calls": [], "finish": None})
        one["content"] += part["delta"].get("content") or ""
        for call in part["delta"].get("tool_calls", []):
            if call.get("id"):
                one["calls"].append({"name": call["function"]["name"], "arguments": ""})
            one["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        one["finish"] = part["finish_reason"] or one["finish"]
    return [found[index] for index in sorted(found)]


def same_everywhere(server: ServerProcess, **fields: object) -> list[dict[str, Any]]:
    """The answers, which must not depend on drafts and streaming."""
    first = answers(server, False, speculative=False, **fields)
    for stream in (False, True):
        for speculative in (False, True):
            assert answers(server, stream, speculative=speculative, **fields) == first
    return first


def tag_token(server: ServerProcess) -> int:
    answer = httpx.post(server.url + "/tokenize", json={"prompt": "<tool_call>"}, timeout=60)
    [token] = answer.json()["tokens"]
    return int(token)


SAMPLING: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5, "n": 3},
]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", ["add_person", "push", "now"])
def test_a_named_function(server: ServerProcess, name: str, sampling: dict[str, object]) -> None:
    chosen = {"type": "function", "function": {"name": name}}
    for answer in same_everywhere(server, tool_choice=chosen, **sampling):
        [call] = answer["calls"]
        assert (call["name"], answer["content"], answer["finish"]) == (name, "", "stop")
        assert holds(name, json.loads(call["arguments"])), call


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:2]])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_required(
    server: ServerProcess, sampling: dict[str, object], parallel: bool, tools: list[object]
) -> None:
    found = same_everywhere(
        server, tools=tools, tool_choice="required", parallel_tool_calls=parallel, **sampling
    )
    for answer in found:
        assert answer["content"] == ""
        assert len(answer["calls"]) == 1 or (parallel and answer["calls"])
        whole = answer["calls"] if answer["finish"] == "tool_calls" else answer["calls"][:-1]
        assert answer["finish"] == "tool_calls" or (parallel and answer["finish"] == "length")
        for call in whole:
            assert holds(call["name"], json.loads(call["arguments"])), call


@pytest.mark.parametrize("sampling", SAMPLING)
def test_strict_calls_in_free_text(server: ServerProcess, sampling: dict[str, object]) -> None:
    """A bias makes the model begin a call; what it calls, and with what, the grammar holds."""
    asked = {
        "logit_bias": {tag_token(server): 100},
        "stop": "</tool_call>",
        "tools": TOOLS[:2],
        **sampling,
    }
    for answer in same_everywhere(server, **asked):
        assert answer["content"] == ""
        [call] = answer["calls"]
        assert answer["finish"] == "tool_calls"
        arguments = json.loads(call["arguments"])
        assert isinstance(arguments, dict)
        assert call["name"] == "add_person" or holds("push", arguments)


def test_free_text_stays_free(server: ServerProcess) -> None:
    plain = answers(server, False, temperature=0, max_tokens=40, tool_choice="none")
    assert same_everywhere(server, temperature=0, max_tokens=40) == plain
    loose = [TOOLS[0]]
    shown = answers(server, False, temperature=0, max_tokens=40, tools=loose, tool_choice="none")
    assert same_everywhere(server, temperature=0, max_tokens=40, tools=loose) == shown


def test_structural_tags_of_response_format(server: ServerProcess) -> None:
    begin, end = "<tool_call>person ", "</tool_call>"
    content = {"type": "json_schema", "json_schema": PERSON}
    triggered = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [{"type": "tag", "begin": begin, "content": content, "end": end}],
        "stop_after_first": True,
    }
    asked: dict[str, Any] = {
        "response_format": {"type": "structural_tag", "format": triggered},
        "logit_bias": {tag_token(server): 100},
        "tools": None,
    }
    for sampling in SAMPLING:
        for answer in same_everywhere(server, **asked, **sampling):
            assert (answer["calls"], answer["finish"]) == ([], "stop")
            inside = answer["content"].removeprefix(begin).removesuffix(end)
            assert answer["content"] == begin + inside + end
            assert holds("add_person", json.loads(inside))


def test_the_official_client(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        message = (
            client.chat.completions.create(
                model="pycoder",
                messages=ASK,  # type: ignore[arg-type, unused-ignore]
                tools=TOOLS,  # type: ignore[arg-type, unused-ignore]
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=0,
                max_tokens=200,
            )
            .choices[0]
            .message
        )
    assert message.content is None
    [call] = message.tool_calls or []
    assert holds(call.function.name, json.loads(call.function.arguments))
