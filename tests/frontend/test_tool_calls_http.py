"""Tools of chat requests: what reaches the template and the core, and the calls of answers."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.ids import i32
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.http import ServerState
from outrider.frontend.tokenizer import Tokenizer

from .fake_core import MODEL, TOKENIZER
from .live_server import LiveServer, live_server, post

CHAT = "/v1/chat/completions"
# The fake core answers with its prompt: a message of "echo" is what the model says.
TEMPLATE = (
    "{% if messages[-1].name == 'echo' %}{{ messages[-1].content }}{% else %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}|{{ c.id }}:{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '#' ~ m.tool_call_id if m.tool_call_id }}\n{% endfor %}{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city.", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "now"}},
]
ASK = {"role": "user", "content": "hi"}
CALLED = 'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>'
TWO = CALLED + '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
END = "<END>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tools")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((MODEL / name).read_bytes())
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    state = ServerState("pycoder", tool_call_parser="hermes")
    with (
        tempfile.TemporaryDirectory(prefix="out-") as short,
        live_server(Path(short), Tokenizer(folder), state) as live,
    ):
        yield live


def said(text: str, **fields: object) -> dict[str, Any]:
    """A request that the fake core answers with ``text``."""
    message = {"role": "user", "name": "echo", "content": text + END}
    return {"messages": [message], "stop": [END], "tools": TOOLS, **fields}


def choice(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    answer = post(server, CHAT, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def streamed(server: LiveServer, body: dict[str, Any], index: int = 0) -> dict[str, Any]:
    """The choice that a stream's deltas join to; its calls have no ids of their own here."""
    content, calls, finish = "", list[dict[str, Any]](), None
    with server.http.stream("POST", CHAT, json=body | {"stream": True}) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    for line in lines:
        for part in json.loads(line)["choices"]:
            if part["index"] != index:
                continue
            content += part["delta"].get("content") or ""
            for call in part["delta"].get("tool_calls", []):
                if call["index"] == len(calls):
                    assert call["id"]
                    assert call["type"] == "function"
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                else:
                    assert "id" not in call
                    assert "name" not in call["function"]
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
            finish = part["finish_reason"] or finish
    return {"content": content, "calls": calls, "finish": finish}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in found["message"].get("tool_calls", [])]
    return {
        "content": found["message"]["content"] or "",
        "calls": calls,
        "finish": found["finish_reason"],
    }


def arrived(server: LiveServer) -> tuple[str, SamplingParams]:
    request = server.core.requests[-1]
    return TOKENIZER.decode(i32(request.prompt).tolist(), False), request.params


@pytest.mark.parametrize("choose", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}])
def test_calls_of_an_answer(server: LiveServer, choose: dict[str, object]) -> None:
    found = choice(server, said(TWO, **choose))
    assert found["finish_reason"] == "tool_calls"
    message = found["message"]
    assert (message["role"], message["content"]) == ("assistant", "Sure.")
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    assert first["id"].startswith("call_")
    assert (first["type"], first["function"]["name"]) == ("function", "weather")
    assert json.loads(first["function"]["arguments"]) == {"city": "Zürich 🙂"}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert arrived(server)[1].grammar is None


@pytest.mark.parametrize(
    ("text", "content", "names", "finish"),
    [
        (TWO, "Sure.", ["weather", "now"], "tool_calls"),
        (CALLED + " Done.", "Sure. Done.", ["weather"], "tool_calls"),
        ("No call.", "No call.", [], "stop"),
        ('<tool_call>{"name": "nope", "arguments": {}}</tool_call>', None, [], "stop"),
        ('<tool_call>{"name": "now"', None, [], "stop"),
        (CALLED[:-30], "Sure.", ["weather"], "stop"),
        (CALLED.removesuffix("}\n</tool_call>"), "Sure.", ["weather"], "tool_calls"),
        (
            '<tool_call>{"name": "now", "arguments": {"a": x}}',
            "x}}",
            ["now"],
            "tool_calls",
        ),
    ],
)
def test_a_stream_is_the_whole_answer_in_parts(
    server: LiveServer, text: str, content: str | None, names: list[str], finish: str
) -> None:
    for block in (1, 3, 100):
        server.core.block = block
        whole = plain(choice(server, said(text)))
        assert whole["content"] == (text if content is None else content)
        assert [call["name"] for call in whole["calls"]] == names
        assert whole["finish"] == finish
        assert streamed(server, said(text)) == whole
    server.core.block = 3


def test_content_is_null_where_there_are_calls_alone(server: LiveServer) -> None:
    found = choice(server, said(CALLED.removeprefix("Sure.")))
    assert found["message"]["content"] is None
    assert "tool_calls" not in choice(server, said("No."))["message"]


def test_every_sample_has_its_own_calls(server: LiveServer) -> None:
    answer = post(server, CHAT, said(TWO, n=2, logprobs=True)).json()
    ids = [call["id"] for one in answer["choices"] for call in one["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    for index in (0, 1):
        assert streamed(server, said(TWO, n=2), index) == plain(answer["choices"][index])


def test_a_cut_answer_says_length(server: LiveServer) -> None:
    for tokens in range(1, len(TOKENIZER.encode(CALLED))):
        body = said(CALLED, max_tokens=tokens)
        whole = plain(choice(server, body))
        assert streamed(server, body) == whole
        assert whole["finish"] == "length"
        arguments = "".join(call["arguments"] for call in whole["calls"])
        assert arguments.rstrip("\ufffd") in CALLED  # the cut may lie within a character


def test_a_stop_within_arguments_stays_a_stop(server: LiveServer) -> None:
    array = '[{"name":"now","arguments":{}},{"name":"weather","arguments":{"city":"Bern"}}]'
    for text, fields in ((TWO, {}), (array, {"tool_choice": "required"})):
        for stop in ("ern", "Zür", '"city"', '"}', "}}"):
            if stop not in text:
                continue
            body = said(text, **fields) | {"stop": [stop]}
            found = choice(server, body)
            assert (found["finish_reason"], found["matched_stop"]) == ("stop", stop)
            with pytest.raises(json.JSONDecodeError):
                json.loads(plain(found)["calls"][-1]["arguments"])
            assert streamed(server, body) == plain(found)
    for tail in ("</tool_call>", "\n</tool"):  # behind the arguments, which are whole
        found = choice(server, said(CALLED) | {"stop": [tail]})
        assert (found["finish_reason"], found["matched_stop"]) == ("tool_calls", tail)


def test_one_call_at_most(server: LiveServer) -> None:
    body = said(TWO, parallel_tool_calls=False)
    whole = plain(choice(server, body))
    assert [call["name"] for call in whole["calls"]] == ["weather"]
    assert whole["content"] == "Sure." + TWO.removeprefix(CALLED)
    assert streamed(server, body) == whole


def test_none_shows_the_tools_and_parses_nothing(server: LiveServer) -> None:
    for nulls in ({}, {"suffix": None}):  # the second way of decoding
        body = said(CALLED, tool_choice="none", response_format={"type": "text"}, **nulls)
        assert plain(choice(server, body)) == {"content": CALLED, "calls": [], "finish": "stop"}
    post(server, CHAT, {"messages": [ASK], "tools": TOOLS, "tool_choice": "none", "max_tokens": 1})
    assert json.dumps(TOOLS[0], ensure_ascii=False) in arrived(server)[0]


def test_what_the_template_gets(server: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": "é"}'}}
    nulls = dict.fromkeys(("refusal", "audio", "annotations", "function_call"))
    messages = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], **nulls},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": False}}]
    body = {"messages": messages, "tools": strict, "max_tokens": 1}
    assert post(server, CHAT, body).status_code == 200
    assert arrived(server)[0] == (
        json.dumps(TOOLS[0]) + '\nuser=hi\nassistant=|c1:now{"a": "é"}\ntool=noon#c1\n'
    )


def test_forced_calls_are_grammars(server: LiveServer) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    found = choice(server, said('{"city":"x"}', tool_choice=named))
    assert plain(found) == {
        "content": "",
        "calls": [{"name": "weather", "arguments": '{"city":"x"}'}],
        "finish": "stop",
    }
    assert found["message"]["content"] is None
    assert arrived(server)[1].grammar == GrammarSpec(
        "json_schema", json.dumps(CITY, separators=(",", ":")), "tools"
    )
    text = '[{"name":"now","arguments":{}},{"name":"weather","arguments":{"city":"x"}}]'
    for stream in (False, True):
        body = said(text, tool_choice="required")
        answer = streamed(server, body) if stream else plain(choice(server, body))
        assert [call["name"] for call in answer["calls"]] == ["now", "weather"]
        assert (answer["content"], answer["finish"]) == ("", "tool_calls")
    grammar = arrived(server)[1].grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert (schema["minItems"], len(schema["items"]["anyOf"])) == (1, 2)
    choice(server, said("[]", tool_choice="required", parallel_tool_calls=False))
    grammar = arrived(server)[1].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["maxItems"] == 1


def test_strict_functions_in_free_text(server: LiveServer) -> None:
    tools = [TOOLS[0], {"type": "function", "function": {"name": "now", "strict": True}}]
    assert plain(choice(server, said(TWO, tools=tools)))["finish"] == "tool_calls"
    grammar = arrived(server)[1].grammar
    assert grammar is not None
    assert (grammar.kind, grammar.field) == ("structural_tag", "tools")
    loose, strict = json.loads(grammar.text)["structures"]
    assert loose["schema"] == {"type": "object"}
    assert strict["schema"]["additionalProperties"] is False
    assert not json.loads(grammar.text)["stop_after_first"]
    choice(server, said(CALLED, tools=tools, parallel_tool_calls=False))
    grammar = arrived(server)[1].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["stop_after_first"]


def test_markers_that_are_special_tokens_stay_visible(folder: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    token = tokenizer["added_tokens"][-1]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = json.dumps(tokenizer).replace(json.dumps(token["content"]), '"[TOOL_CALLS]"')
    (tmp_path / "tokenizer.json").write_text(text)
    state = ServerState("pycoder", tool_call_parser="mistral")
    with (
        tempfile.TemporaryDirectory(prefix="out-") as short,
        live_server(Path(short), Tokenizer(tmp_path), state) as live,
    ):
        body = said('[TOOL_CALLS] [{"name": "now", "arguments": {}}]')
        # The fake core's tokenizer does not know the marker, so its stop string is not seen.
        found = choice(live, body | {"max_tokens": 24})
        assert not live.core.requests[-1].params.skip_special_tokens
        [call] = found["message"]["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": "{}"}
        assert len(call["id"]) == 9
        choice(live, body | {"tool_choice": "none", "max_tokens": 3})
        assert live.core.requests[-1].params.skip_special_tokens


def function(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **fields}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": [function(name="a b")]}, "tools[0].function.name", "letters"),
    ({"tools": [function(), function()]}, "tools[1].function.name", "twice"),
    ({"tools": [function(parameters=[])]}, "tools[0].function.parameters", "array"),
    ({"tools": [function(stric=True)]}, "tools[0].function.stric", "unknown"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "now"}}},
     "tool_choice", "needs tools"),
    ({"tool_choice": "any"}, "tool_choice", "any"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "none of"),
    ({"tool_choice": {"type": "allowed_tools", "function": {"name": "f"}}},
     "tool_choice.type", "allowed_tools"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
    ({"tool_choice": "required", "tools": [function(parameters={"type": "array"})]},
     "tools[0].function.parameters", "type object"),
    ({"tool_choice": "required", "tools": [TOOLS[0], function(parameters={"maxLenght": 3})]},
     "tools[1].function.parameters", '"#/maxLenght"'),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}},
      "tools": [TOOLS[0], function(parameters={"maxLenght": 3})]},
     "tools[1].function.parameters", '"#/maxLenght"'),
    ({"tools": [TOOLS[0], function(parameters={"maxLenght": 3}, strict=True)]},
     "tools[1].function.parameters", '"#/maxLenght"'),
    ({"tool_choice": "required", "tools": [TOOLS[0], function(parameters={"$anchor": "A"})]},
     "tools[1].function.parameters", "JSON pointer"),
    ({"tools": None, "tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tools": [], "tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}},
     "tool_choice", "response_format"),
    ({"regex": "a"}, "tool_choice", "regex"),
    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "tools"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]},
     "messages[0].tool_call_id", "role tool"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]},
     "messages[0].tool_calls", "assistant"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": '{"a": '}}]}]},
     "messages[0].tool_calls[0].function.arguments", "JSON object"),
    ({"messages": [{"role": "assistant", "content": "a", "function_call": {}}]},
     "messages[0].function_call", "null"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_is_refused(
    server: LiveServer, fields: dict[str, Any], param: str, words: str
) -> None:
    before = len(server.core.requests)
    answer = post(server, CHAT, {"messages": [ASK], "tools": TOOLS, "max_tokens": 1, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert words in error["message"]
    assert len(server.core.requests) == before


def test_auto_without_a_parser_names_the_flag(chat_server: LiveServer) -> None:
    body = {"messages": [ASK], "tools": TOOLS, "max_tokens": 1}
    answer = post(chat_server, CHAT, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tool_choice"
    assert "--tool-call-parser" in error["message"]
    for choose in ("none", "required"):
        assert post(chat_server, CHAT, body | {"tool_choice": choose}).status_code == 200
    nothing: list[dict[str, object]] = [
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"tool_choice": "none", "parallel_tool_calls": False},
    ]
    for fields in nothing:
        assert post(chat_server, CHAT, {"messages": [ASK], "max_tokens": 1, **fields}).is_success


def test_tools_that_fill_the_context_are_named(server: LiveServer) -> None:
    long = [function(description="much " * 20_000)]
    for fields in ({}, {"tool_choice": "required"}):
        answer = post(server, CHAT, {"messages": [ASK], "tools": long, **fields})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "messages"
        assert "the tools are a part of it" in error["message"]
    answer = post(server, CHAT, {"messages": [ASK | {"content": "much " * 20_000}]})
    assert answer.status_code == 400
    assert "tools" not in answer.json()["error"]["message"]


def test_what_the_core_refuses_names_the_function(server: LiveServer) -> None:
    """Long schemas are checked there, all of them as one."""
    long = {"properties": {f"p{i}": {"type": "string"} for i in range(400)}}
    wrong = function(parameters=long | {"maxLenght": 3})
    body = said("", tools=[TOOLS[0], wrong], tool_choice="required")
    server.core.refusal = Refused("tools", "is no JSON Schema that works here: something")
    try:
        for stream in (False, True):
            answer = post(server, CHAT, body | {"max_tokens": 1, "stream": stream})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "tools[1].function.parameters"
            assert '"#/maxLenght"' in error["message"]
        right = body | {"tools": [TOOLS[0], function(parameters=long)], "max_tokens": 1}
        assert post(server, CHAT, right).json()["error"]["param"] == "tools"
    finally:
        server.core.refusal = None


def test_completions_have_no_tools(server: LiveServer) -> None:
    answer = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1, "tools": TOOLS})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    neutral = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1, **neutral}).is_success


def test_the_official_client(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body = said(TWO, model="pycoder")
        message = client.chat.completions.create(**body).choices[0].message
        assert message.tool_calls is not None
        assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
        with client.chat.completions.stream(**body) as stream:
            for _ in stream:
                pass
            joined = stream.get_final_completion().choices[0]
        assert joined.finish_reason == "tool_calls"
        assert joined.message.content == "Sure."
        assert joined.message.tool_calls is not None
        for ours, theirs in zip(joined.message.tool_calls, message.tool_calls, strict=True):
            assert ours.function.arguments == theirs.function.arguments
        # What came back goes into the next request, as its users send it.
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "done"}
            for call in message.tool_calls
        ]
        for sent in (message, message.model_dump(), joined.message.model_dump(exclude_none=True)):
            next_turn: list[Any] = [ASK, sent, *results]
            client.chat.completions.create(
                model="pycoder", messages=next_turn, tools=TOOLS, max_tokens=1
            )
            assert '{"city": "Zürich 🙂"}' in arrived(server)[0]
