"""Malformed HTTP requests: each gets a clear 4xx that names the field; the server lives on."""

import json
import socket
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .live_server import LiveServer

C, CHAT, G = "/v1/completions", "/v1/chat/completions", "/generate"
MESSAGE = {"role": "user", "content": "hi"}
JSON = {"content-type": "application/json"}


def p(**fields: object) -> dict[str, object]:
    return {"prompt": "a", **fields}


def g(**sampling: object) -> dict[str, object]:
    return {"text": "a", "sampling_params": sampling}


def s(**fields: object) -> dict[str, object]:
    return {"text": "a", "return_logprob": True, **fields}


# (path, body, status, the field that the answer must name)
BODIES: list[tuple[str, object, int, str]] = [
    (C, {}, 400, "prompt"),
    (C, [], 400, "body"),
    (C, "text", 400, "body"),
    (C, 5, 400, "body"),
    (C, None, 400, "body"),
    (C, {"prompt": ""}, 400, "prompt"),
    (C, {"prompt": []}, 400, "prompt"),
    (C, {"prompt": 5}, 400, "prompt"),
    (C, {"prompt": [[]]}, 400, "prompt"),
    (C, {"prompt": ["a", 1]}, 400, "prompt"),
    (C, {"prompt": ["a", [1]]}, 400, "prompt"),
    (C, {"prompt": [1.5]}, 400, "prompt"),
    (C, {"prompt": [8192]}, 400, "prompt"),
    (C, {"prompt": [-1]}, 400, "prompt"),
    (C, {"prompt": [10**30]}, 400, "prompt"),
    (C, {"prompt": [7] * 512}, 400, "prompt"),
    (C, {"prompt": ["a"] * 1025}, 400, "prompt"),
    (C, {"prompt": {"text": "a"}}, 400, "prompt"),
    (C, p(max_tokens=0), 400, "max_tokens"),
    (C, p(max_tokens=-1), 400, "max_tokens"),
    (C, p(max_tokens="many"), 400, "max_tokens"),
    (C, p(max_tokens=1.5), 400, "max_tokens"),
    (C, p(max_tokens=512), 400, "max_tokens"),
    (C, p(max_tokens=10**20), 400, "max_tokens"),
    (C, p(min_tokens=20), 400, "min_tokens"),
    (C, p(temperature=-0.1), 400, "temperature"),
    (C, p(temperature="hot"), 400, "temperature"),
    (C, p(temperature=True), 400, "temperature"),
    (C, p(top_p=0), 400, "top_p"),
    (C, p(top_p=1.1), 400, "top_p"),
    (C, p(top_k=0), 400, "top_k"),
    (C, p(top_k=-2), 400, "top_k"),
    (C, p(min_p=2), 400, "min_p"),
    (C, p(n=0), 400, "n"),
    (C, p(n=129), 400, "n"),
    (C, p(seed=2**64), 400, "seed"),
    (C, p(seed="x"), 400, "seed"),
    (C, p(frequency_penalty=2.5), 400, "frequency_penalty"),
    (C, p(presence_penalty=-3), 400, "presence_penalty"),
    (C, p(repetition_penalty=0), 400, "repetition_penalty"),
    (C, p(stop=[""]), 400, "stop"),
    (C, p(stop=5), 400, "stop"),
    (C, p(stop=["x"] * 33), 400, "stop"),
    (C, p(stop_token_ids=[9000]), 400, "stop_token_ids"),
    (C, p(stop_token_ids="5"), 400, "stop_token_ids"),
    (C, p(logit_bias={"9000": 1}), 400, "logit_bias"),
    (C, p(logit_bias={"a": 1}), 400, "logit_bias"),
    (C, p(logit_bias={"5": 101}), 400, "logit_bias"),
    (C, p(logit_bias=[1]), 400, "logit_bias"),
    (C, p(bad_words="x"), 400, "bad_words"),
    (C, p(bad_words=["x", " "]), 400, "bad_words"),
    (C, p(bad_words=["word " * 40]), 400, "bad_words"),
    (C, p(bad_words_ids=[[1], [9000]]), 400, "bad_words_ids"),
    (C, p(bad_words_ids=[1]), 400, "bad_words_ids"),
    (C, p(allowed_token_ids=[]), 400, "allowed_token_ids"),
    (C, p(logprobs=129), 400, "logprobs"),
    (C, p(logprobs=-1), 400, "logprobs"),
    (C, p(stream="yes"), 400, "stream"),
    (C, p(stream_options={"include_usage": True}), 400, "stream_options"),
    (C, p(stream=True, stream_options={"other": True}), 400, "stream_options.other"),
    (C, p(rid=["a", "b"]), 400, "rid"),
    (C, p(rid=""), 400, "rid"),
    (C, p(priority=2**40), 400, "priority"),
    (C, p(cache_salt=5), 400, "cache_salt"),
    (C, p(model="other"), 404, "model"),
    (C, p(model=5), 400, "model"),
    (C, p(temprature=1), 400, "temprature"),
    (C, p(best_of=1, n=2), 400, "best_of"),
    (C, p(best_of=129), 400, "best_of"),
    (C, p(best_of=3, stream=True), 400, "best_of"),
    (C, p(suffix="x"), 400, "suffix: is not supported (suffix): write it"),
    (C, p(use_beam_search=True), 400, "use_beam_search: is not supported (beam search): use n"),
    (C, p(logit_bias={"1.5": 1}), 400, "logit_bias: a key: Expected `int`"),
    (C, p(regex="a("), 400, "regex"),
    (C, p(regex="a+", guided_json={}), 400, "guided_json"),
    (C, p(guided_choice=[]), 400, "guided_choice"),
    (C, p(guided_choice=["a", 1]), 400, "guided_choice[1]"),
    (C, p(guided_json=5), 400, "guided_json"),
    (C, p(ebnf="root ::= x", min_tokens=1), 400, "ebnf"),
    (C, p(regex="a+", min_tokens=1), 400, "min_tokens"),
    (C, p(regex="a+", ignore_eos=True), 400, "ignore_eos"),
    (C, p(structured_outputs={"json": {}, "regex": "a"}), 400, "structured_outputs.regex"),
    (C, p(structured_outputs={"xml": "a"}), 400, "structured_outputs.xml"),
    (C, p(structured_outputs={"structural_tag": "{}"}), 400, "structured_outputs.structural_tag"),
    (C, p(response_format={"type": "xml"}), 400, "response_format.type"),
    (C, p(response_format={"type": "json_schema"}), 400, "response_format.json_schema.schema"),
    (C, p(response_format={"type": "text", "json_schema": {}}), 400, "response_format.json_schema"),
    (C, p(response_format={"type": "text", "schema": {}}), 400, "response_format.schema"),
    (C, p(response_format={"type": "structural_tag"}), 400, "response_format: needs structures"),
    (C, p(response_format={"type": "text", "triggers": []}), 400, "response_format.triggers"),
    (C, p(guided_decoding_backend="outlines"), 400, "guided_decoding_backend"),
    (C, p(echo=True, max_tokens=-1), 400, "max_tokens"),
    (C, p(echo="yes"), 400, "echo"),
    (C, p(prompt_logprobs=-1), 400, "prompt_logprobs"),
    (C, p(prompt_logprobs=129), 400, "prompt_logprobs"),
    (C, p(prompt_logprobs=1, stream=True), 400, "prompt_logprobs"),
    (C, p(lora_path="x"), 400, "lora_path"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [MESSAGE]}, 400, "messages"),
    (CHAT, {"messages": [MESSAGE], "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"messages": [MESSAGE], "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": [MESSAGE], "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": [MESSAGE], "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    (CHAT, {"messages": [MESSAGE], "return_token_ids": 1}, 400, "return_token_ids"),
    (CHAT, {"messages": [MESSAGE], "max_tokens": 1, "max_completion_tokens": 2}, 400, "max_comp"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        501,
        "messages[0].content[0]",
    ),
    (G, {}, 400, "text"),
    (G, {"text": "a", "input_ids": [1]}, 400, "text"),
    (G, {"text": []}, 400, "text"),
    (G, {"input_ids": []}, 400, "input_ids"),
    (G, {"text": ""}, 400, "text: is empty"),
    (G, {"text": ["a", ""], "stream": True}, 400, "text: is empty"),
    (G, {"text": "a " * 600}, 400, "text: has "),
    (G, {"input_ids": [[]]}, 400, "input_ids: is empty"),
    (G, {"input_ids": [8192]}, 400, "input_ids: token id"),
    (G, {"input_ids": [1, [2]]}, 400, "input_ids"),
    (G, {"input_ids": ["a"]}, 400, "input_ids"),
    (G, {"text": ["a", "b"], "sampling_params": [{}]}, 400, "sampling_params"),
    (G, {"text": "a", "sampling_params": 5}, 400, "sampling_params"),
    (G, g(top_k=0), 400, "sampling_params.top_k: must be -1"),
    (G, g(logit_bias={"a": 1}), 400, "sampling_params.logit_bias: a key: Expected `int`"),
    (G, g(bad_words=["a " * 40]), 400, "sampling_params.bad_words: 'a a "),
    (G, g(max_new_tokens=-1), 400, "sampling_params.max_new_tokens: must be"),
    (G, g(max_new_tokens=10**30), 400, "max_new_tokens"),
    (G, g(min_new_tokens=200), 400, "min_new_tokens"),
    (G, g(json_schema="{"), 400, "sampling_params.json_schema"),
    (G, g(json_schema="{}", regex="a"), 400, "sampling_params.regex"),
    (G, g(response_format={"type": "json_object"}), 400, "sampling_params.response_format"),
    (G, g(structural_tag="x"), 400, "sampling_params.structural_tag"),
    (G, g(unknown=1), 400, "sampling_params.unknown"),
    (G, g(seed=1, sampling_seed=2), 400, "sampling_seed"),
    (G, {"text": "a", "logprob_start_len": 0}, 400, "logprob_start_len"),
    (G, s(logprob_start_len=-2), 400, "logprob_start_len: must be between -1 and"),
    (G, s(top_logprobs_num=129), 400, "top_logprobs_num: must be between 0 and 128, got 129"),
    (G, s(top_logprobs_num=-1), 400, "top_logprobs_num: must be between 0 and 128, got -1"),
    (G, {"text": "a", "top_logprobs_num": 3}, 400, "top_logprobs_num"),
    (G, {"text": "a", "rid": ["x"]}, 400, "rid"),
    (G, {"text": ["a", "b"], "rid": ["x", "x"]}, 400, "rid"),
    (G, {"text": "a", "image_data": "x"}, 400, "image_data"),
    ("/abort_request", {}, 400, "rid"),
    ("/abort_request", {"rid": 5}, 400, "rid"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
    ("/remove_external_corpus", {}, 400, "corpus_id"),
    ("/add_external_corpus", {"corpus_id": "a", "name": "b"}, 400, "name"),
    ("/add_external_corpus", {"documents": "text"}, 400, "documents"),
]

# (path, raw body, headers, status, what the message says)
RAW: list[tuple[str, bytes, dict[str, str], int, str]] = [
    (C, b"", JSON, 400, "body"),
    (C, b"   ", JSON, 400, "body"),
    (C, b"{", JSON, 400, "JSON"),
    (C, b'{"prompt": "a",}', JSON, 400, "JSON"),
    (C, b"{'prompt': 'a'}", JSON, 400, "JSON"),
    (C, b'{"prompt": "\xff\xfe"}', JSON, 400, "JSON"),
    (C, b'{"prompt": "\\ud800"}', JSON, 400, "body"),
    (C, b'{"prompt": "a", "temperature": NaN}', JSON, 400, "JSON"),
    (C, b'{"prompt": "a", "temperature": 1e999}', JSON, 400, "temperature"),
    (C, b'{"prompt": ' + b"[" * 100_000, JSON, 400, "prompt"),
    (C, b'{"prompt": "a", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", JSON, 400, ""),
    (C, b'{"prompt": "a"}', {"content-type": "text/plain"}, 415, "content-type"),
    (C, b"prompt=a", {"content-type": "application/x-www-form-urlencoded"}, 415, "content-type"),
    (G, b'{"text": "' + b"a" * (33 * 1024 * 1024) + b'"}', JSON, 413, "body"),
]


@pytest.fixture(autouse=True)
def alive_afterwards(server: LiveServer) -> Iterator[None]:
    yield
    assert server.http.get("/health").status_code == 200
    assert server.service.open_requests == 0


def check_shape(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return f"{error['message']} {error['param']}"


@pytest.mark.parametrize(("path", "body", "status", "field"), BODIES)
def test_malformed_body(
    server: LiveServer, path: str, body: object, status: int, field: str
) -> None:
    content = json.dumps(body).encode()
    answer = server.http.post(path, content=content, headers=JSON)
    assert answer.status_code == status, answer.text
    assert field in check_shape(answer)


@pytest.mark.parametrize(("path", "content", "headers", "status", "says"), RAW)
def test_malformed_bytes(
    server: LiveServer, path: str, content: bytes, headers: dict[str, str], status: int, says: str
) -> None:
    answer = server.http.post(path, content=content, headers=headers)
    assert answer.status_code == status, answer.text[:500]
    assert says in check_shape(answer)


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/v1/completions", 405, "GET"),
        ("DELETE", "/generate", 405, "DELETE"),
        ("POST", "/health", 405, "POST"),
        ("GET", "/nothing", 404, "/nothing"),
        ("POST", "/v1/embeddings", 404, "/v1/embeddings"),
        ("GET", "/v1/models/other", 404, "model"),
        ("GET", "/flush_cache?timeout=x", 400, "timeout"),
        ("GET", "/flush_cache?timeout=-1", 400, "timeout"),
        ("GET", "/flush_cache?timeout=nan", 400, "timeout"),
    ],
)
def test_wrong_path_or_method(
    server: LiveServer, method: str, path: str, status: int, says: str
) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status
    assert says in check_shape(answer)


def test_streamed_body_over_the_limit(server: LiveServer) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"text": "'
        for _ in range(40):
            yield b"a" * (1024 * 1024)

    answer = server.http.post(G, content=endless(), headers=JSON)
    assert answer.status_code == 413
    assert "body" in check_shape(answer)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{",  # and then leaves
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_broken_http(server: LiveServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(sent)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
WORDS = (
    "prompt text input_ids messages max_tokens sampling_params temperature stop n rid stream "
    "logprobs logit_bias stream_options seed documents tools unknown"
)
NAMES = st.sampled_from(WORDS.split()) | st.text(max_size=6)


def test_random_json_never_breaks_the_server(server: LiveServer) -> None:
    seen: Counter[int] = Counter()

    @settings(max_examples=150)
    @given(
        path=st.sampled_from([C, CHAT, G, "/tokenize", "/abort_request", "/detokenize"]),
        body=st.dictionaries(NAMES, VALUES, max_size=5),
        valid=st.booleans(),
    )
    def check(path: str, body: dict[str, object], valid: bool) -> None:
        if valid and path in (C, G):
            body = {k: v for k, v in body.items() if k in ("stream", "rid", "n", "seed")}
            body |= {"prompt": "a"} if path == C else g(max_new_tokens=2)
        answer = server.http.post(path, content=json.dumps(body), headers=JSON)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500
        seen[answer.status_code] += 1

    check()
    assert seen[200] >= 10
    assert seen[400] >= 50


@pytest.mark.parametrize("body", [b'{"":', b'{"unknown": 1, "b": "\xff"}', b'{"x": 1} {'])
def test_damage_after_an_unknown_field_is_refused(server: LiveServer, body: bytes) -> None:
    answer = server.http.post(G, content=body, headers=JSON)
    assert answer.status_code == 400
    check_shape(answer)


@settings(max_examples=100)
@given(path=st.sampled_from([C, CHAT, G]), body=st.binary(max_size=60))
def test_random_bytes_are_refused(server: LiveServer, path: str, body: bytes) -> None:
    answer = server.http.post(path, content=body, headers=JSON)
    assert 400 <= answer.status_code < 500
    check_shape(answer)
