"""Served output obeys its grammar, plainly and with n-gram drafts, streamed or not."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from outrider import Client, GrammarSpec, SamplingParams

from ..frontend.server_process import ServerProcess, real_server

pytestmark = pytest.mark.serial
PROMPT = "# A person, as JSON: name, age and tags\n"
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
        "address": {"anyOf": [{"type": "null"}, {"const": {"city": "Genève"}}]},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,6} = [0-9]{1,4}(\.[0-9])?;"
GBNF = 'root ::= call (", " call){1,2}\ncall ::= ("get" | "set") "(" [a-c]{1,3} ")"'
CALL = r"(get|set)\([a-c]{1,3}\)"
LONG = {"type": "array", "uniqueItems": True, "description": "x" * 9000}
CHOICES = ["maybe", "may", "no way\n", "ünique 🙂"]


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text))
        and list(found) == ["name", "age", "tags", "address"]
        and len(found["name"]) <= 10
        and 0 <= found["age"] <= 120
        and len(found["tags"]) <= 3
        and set(found["tags"]) <= {"new", "old"}
        and found["address"] in (None, {"city": "Genève"})
    )


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--speculative-algorithm", "NGRAM", "--max-running-requests", "8")
    with real_server(*flags) as running:
        yield running


def texts(server: ServerProcess, stream: bool, **fields: object) -> list[tuple[str, str]]:
    """Text and finish reason of each sample of a completion."""
    body = {"prompt": PROMPT, "max_tokens": 160, "stream": stream, **fields}
    url = server.url + "/v1/completions"
    if not stream:
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return [(c["text"], c["finish_reason"]) for c in answer.json()["choices"]]
    parts: dict[int, list[str]] = {}
    ends: dict[int, str] = {}
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                parts.setdefault(choice["index"], []).append(choice["text"])
                if choice["finish_reason"] is not None:
                    ends[choice["index"]] = choice["finish_reason"]
    return [("".join(parts[i]), ends[i]) for i in sorted(parts)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("speculative", [False, True])
def test_every_notation(server: ServerProcess, speculative: bool, stream: bool) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 7, "n": 3}):
        fields: dict[str, object] = {"speculative": speculative, **sampling}
        wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
        for asked in ({"response_format": wanted}, {"guided_json": json.dumps(SCHEMA)}):
            for text, end in texts(server, stream, **asked, **fields):
                assert is_person(text), text
                assert end == "stop"
        for text, end in texts(server, stream, regex=REGEX, **fields):
            assert re.fullmatch(REGEX, text), text
            assert end == "stop"
        for text, end in texts(server, stream, ebnf=GBNF, **fields):
            assert re.fullmatch(rf"{CALL}(, {CALL}){{1,2}}", text), text
            assert end == "stop"
        for text, end in texts(server, stream, guided_choice=CHOICES, **fields):
            assert text in CHOICES
            assert end == "stop"


def test_drafts_change_no_text_and_forced_tokens_are_drafts(server: ServerProcess) -> None:
    with Client(server.endpoint) as client:
        grammar = GrammarSpec("json_schema", json.dumps(SCHEMA))
        base = SamplingParams(max_new_tokens=160, seed=11, grammar=grammar)
        for temperature in (0.0, 1.0):
            plain = client.generate(PROMPT, base, temperature=temperature, speculative=False)
            drafted = client.generate(PROMPT, base, temperature=temperature)
            assert plain.token_ids == drafted.token_ids
            assert is_person(drafted.text)
            assert drafted.outputs[0].finish_reason == "stop"
            steps = drafted.meta_info["spec_verify_ct"]
            assert isinstance(steps, int)
            assert 0 < steps < drafted.completion_tokens


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"regex": r"a{3}[^\s\S]"}, "regex: no text is of this grammar"),
        (
            {"ebnf": "start: <|nope|>"},
            "ebnf: is no GBNF or Lark grammar that works here: at 1(8): ",
        ),
        ({"guided_json": LONG}, "guided_json: is no JSON Schema"),
    ],
)
def test_what_only_the_core_can_tell_is_refused(
    server: ServerProcess, asked: dict[str, object], words: str
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, **asked}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(words)
    assert error["param"] == words.partition(":")[0]
    assert "\n" not in error["message"]


def test_an_object_is_cut_by_the_length_limit_alone(server: ServerProcess) -> None:
    [(text, end)] = texts(
        server, False, response_format={"type": "json_object"}, max_tokens=12, temperature=0
    )
    assert text.startswith("{")
    if end == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert end == "length"


def test_requests_with_and_without_grammars_share_steps(server: ServerProcess) -> None:
    common: dict[str, object] = {"max_new_tokens": 40, "temperature": 0.8, "seed": 3}
    asked: list[dict[str, object]] = [{"regex": REGEX}, {}, {"guided_choice": CHOICES}]
    samplings = [common | fields for fields in asked]
    body = {"text": [PROMPT] * len(samplings), "sampling_params": samplings}
    together = httpx.post(server.url + "/generate", json=body, timeout=60).json()
    for answer, sampling in zip(together, samplings, strict=True):
        alone = {"text": PROMPT, "sampling_params": sampling}
        expected = httpx.post(server.url + "/generate", json=alone, timeout=60).json()
        assert answer["output_ids"] == expected["output_ids"]
    assert re.fullmatch(REGEX, together[0]["text"])
    assert together[2]["text"] in CHOICES


def test_the_official_client_parses_what_it_gets(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="pycoder",
            prompt=PROMPT,
            max_tokens=160,
            temperature=0,
            extra_body={"structured_outputs": {"json": SCHEMA}},
        )
    assert is_person(answer.choices[0].text)


def test_the_command_line(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    command = [sys.executable, "-P", "-m", "outrider", "generate", "--model", "pycoder"]
    sampling = ["--prompt", PROMPT, "--max-new-tokens", "160", "--temperature", "0"]
    ran = subprocess.run(
        [*command, "--num-threads", "1", "--json-schema", str(schema), *sampling],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert is_person(ran.stdout.removesuffix("\n"))
