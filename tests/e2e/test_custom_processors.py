"""Custom logits processors through real servers, the SDK, ``LLM`` and the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import LLM, Client, SamplingParams
from outrider.engine_core.refusal import RefusedError

from ..engine.processor_package import EXAMPLES
from ..frontend.server_process import real_server

pytestmark = pytest.mark.serial
FLAGS = ["--logits-processors", "two_back,ruled=example_processors:Count"]
PROMPT = "x = 1\nx = 1\nx = 1\nx = 1\n"
BACK = 5  # tokens of a line
Found = dict[str, list[int]]


def repeats(text: list[int], begin: int) -> int:
    """Tokens from ``begin`` on that repeat the one that stands so far back."""
    return sum(text[at] == text[at - BACK] for at in range(begin, len(text)))


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """For the processes that are started here, as an installed package would be."""
    with pytest.MonkeyPatch.context() as patched:
        known = os.environ.get("PYTHONPATH")
        patched.setenv("PYTHONPATH", str(EXAMPLES) + (f":{known}" if known else ""))
        patched.syspath_prepend(str(EXAMPLES))
        yield


def body(**sampling: object) -> dict[str, object]:
    params = {"temperature": 0, "max_new_tokens": 24, **sampling}
    return {"text": PROMPT, "sampling_params": params}


def through_all_doors(url: str, endpoint: str) -> Found:
    """The same request by each door, which all give the same; and what is refused."""
    calls = {"two_back": {"back": BACK}}
    with httpx.Client(base_url=url, timeout=60) as http, Client(endpoint) as sdk:

        def post(path: str, sent: dict[str, object], status: int = 200) -> Any:
            answer = http.post(path, json=sent)
            assert answer.status_code == status, answer.text
            return answer.json()

        found = {
            "without": post("/generate", body())["output_ids"],
            "with": post("/generate", body(logits_processors=calls))["output_ids"],
            "both": post(
                "/generate", body(logits_processors={"ruled": {}, "two_back": {"strength": 1}})
            )["output_ids"],
        }
        ids = post("/tokenize", {"prompt": PROMPT})["tokens"]
        assert repeats([*ids, *found["without"]], len(ids)) > 10
        assert repeats([*ids, *found["with"]], len(ids)) == 0
        openai: dict[str, object] = {
            "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "return_token_ids": True,
            "logits_processors": calls,
        }  # fmt: skip
        assert post("/v1/completions", openai)["choices"][0]["token_ids"] == found["with"]
        params = SamplingParams(temperature=0, max_new_tokens=24, logits_processors=calls)  # type: ignore[arg-type]
        assert list(sdk.generate(PROMPT, params).token_ids) == found["with"]

        for wrong, field, words in (
            ({"three_back": {}}, "sampling_params.logits_processors", "loaded: two_back, ruled"),
            (
                {"two_back": {"back": 0}},
                "sampling_params.logits_processors.two_back",
                "back must be 1 to",
            ),
            ({"two_back": 5}, "sampling_params.logits_processors[...]", "got `int`"),
            (["two_back"], "sampling_params.logits_processors", "got `array`"),
        ):
            error = post("/generate", body(logits_processors=wrong), 400)["error"]
            assert error["message"].startswith(f"{field}: ")
            assert words in error["message"]
        for field, value in (
            ("custom_logit_processor", "gASVAAAA"),
            ("custom_params", {"back": 1}),
            ("vllm_xargs", {"back": 1}),
        ):
            for path, sent in (("/generate", body(**{field: value})), ("/v1/completions", openai)):
                if path != "/generate":
                    sent = {**sent, field: value}
                error = post(path, sent, 400)["error"]
                assert field in error["message"]
                assert "logits_processors" in error["message"]
        shown = http.get("/v1/capabilities").json()["logits_processors"]
        assert shown["loaded"] == ["two_back", "ruled"]
        assert {"name": "two_back", "package": "example-processors", "refused": ""} in shown[
            "installed"
        ]
    return found


def test_every_door_and_drafter_gives_the_same() -> None:
    answers = []
    for drafter in ((), ("NGRAM",), ("EAGLE3",)):
        flags = [f for name in drafter for f in ("--speculative-algorithm", name)]
        with real_server(*FLAGS, *flags) as server:
            answers.append(through_all_doors(server.url, server.endpoint))
    assert answers[0] == answers[1] == answers[2]
    first, *rest = answers[0]["both"]
    assert rest == list(range(first + 1, first + 24))


def test_batches_and_the_command_line_take_them(tmp_path: Path) -> None:
    def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "outrider", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    engine = ["--model", "pycoder", "--num-threads", "1", *FLAGS]
    plain = ["--temperature", "0", "--max-new-tokens", "8"]
    calls = {"two_back": {"back": BACK}}
    lines = tmp_path / "in.jsonl"
    lines.write_text(
        json.dumps({"prompt": PROMPT, "logits_processors": calls})
        + "\n"
        + json.dumps({"prompt": PROMPT})
        + "\n"
        + json.dumps({"prompt": PROMPT, "logits_processors": {"two_back": {"far": 1}}})
        + "\n"
    )
    out = tmp_path / "out.jsonl"
    done = outrider("run", *engine, *plain, "--input", str(lines), "--output", str(out))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    texts = sorted(found, key=lambda one: int(one["id"]))
    assert "unknown argument far" in json.dumps(texts[2]), done.stderr
    assert texts[0]["text"] != texts[1]["text"]
    flag = ["--logits-processor-args", json.dumps(calls)]
    said = outrider("generate", *engine, *plain, *flag, "--prompt", PROMPT)
    assert texts[0]["text"] in said.stdout, said.stderr
    wrong = outrider("generate", *engine, *plain, "--logits-processor-args", "[1]", "--prompt", "x")
    assert wrong.returncode == 2
    assert "logits_processor_args" in wrong.stderr


def test_the_offline_engine_takes_them_and_says_what_it_cannot_load() -> None:
    params = SamplingParams(temperature=0, max_new_tokens=5, logits_processors={"count": {}})
    with LLM(model="pycoder", num_threads=1, logits_processors="count") as llm:
        assert llm.info.processors == ("count",)
        (result,) = llm.generate([[5, 6]], params)
    assert result.token_ids == (7, 8, 9, 10, 11)
    with pytest.raises(RefusedError, match="no package here adds"):
        LLM(model="pycoder", logits_processors="no_such")
