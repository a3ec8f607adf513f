"""``outrider run``: every line answered once, whatever the lines are and however often it dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.batch_input import BadItem, OpenAIItem, PromptItem, parse_line, read_items
from outrider.frontend.batch_output import open_output
from outrider.frontend.errors import OutriderError

FAKE_CLI = Path(__file__).with_name("fake_cli.py")
Record = dict[str, object]


def start(source: Path, target: Path, *extra: str, step_ms: str = "1") -> "subprocess.Popen[str]":
    command = [sys.executable, str(FAKE_CLI), "2", step_ms, "run", "--model", "pycoder"]
    command += ["--input", str(source), "--output", str(target), "--no-progress", *extra]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def run(source: Path, target: Path, *extra: str) -> str:
    with start(source, target, *extra) as child:
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == 0, stderr
    return stderr


def records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: list[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


OPENAI = {"model": "pycoder", "prompt": "x = ", "max_tokens": 3}
MIXED: list[tuple[str, object, str | None]] = [
    ('{"prompt": "def f(", "max_new_tokens": 5}', 1, None),
    ('{"prompt": "def g(", "max_tokens": 5, "id": "a"}', "a", None),
    ('{"prompt": "again", "id": "a"}', "a", "used by an earlier line"),
    ("not json", 4, "not a JSON object"),
    ("", None, None),
    ('{"prompt": "x", "temperature": -1}', 6, "temperature"),
    ('{"prompt": "x", "json_schema": "{"}', 7, "json_schema"),
    ('{"prompt": 5}', 8, "prompt"),
    ('{"text": "x"}', 9, "prompt: is missing"),
    ('{"prompt": "x", "no_such_field": 1}', 10, "no_such_field"),
    ('{"prompt": [], "max_new_tokens": 1}', 11, "empty"),
    ('{"prompt": [99999], "max_new_tokens": 1}', 12, "vocabulary"),
    ('{"prompt": "x", "max_new_tokens": "many"}', 13, "max_new_tokens"),
    ('{"prompt": "x", "max_new_tokens": 5, "max_tokens": 5}', 14, "means the same"),
    ("[1, 2]", 15, "not a JSON object"),
    ('{"prompt": "x"', 16, "not a JSON object"),
    ("\udcff", 17, "not a JSON object"),
    ('{"prompt": [7, 8], "max_new_tokens": 2, "n": 2}', 18, None),
    ('{"prompt": "x", "id": 1.5}', 19, "id: "),
]


def test_every_line_gets_its_answer(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes("\n".join(line for line, _, _ in MIXED).encode("utf-8", "surrogateescape"))
    summary = tmp_path / "summary.json"
    run(source, target, "--summary-json", str(summary))
    found = records(target)
    expected = [(key, error) for _, key, error in MIXED if key is not None]
    assert len(found) == len(expected)
    for key, error in expected:
        mine = [r for r in found if r["id"] == key]
        if error is None:
            assert any("error" not in r for r in mine), key
        else:
            assert any(error in str(r.get("error")) for r in mine), (key, mine)
    ok = {str(r["id"]): r for r in found if "error" not in r}
    assert set(ok["1"]) == {"id", "text", "output_ids", "finish_reason", "meta_info"}
    assert ok["1"]["finish_reason"] == "length"
    choices = ok["18"]["choices"]
    assert isinstance(choices, list)
    assert [c["output_ids"] for c in choices] == [[9, 10], [9, 10]]
    counts = json.loads(summary.read_text())
    assert (counts["lines"], counts["completed"], counts["errors"]) == (18, 3, 15)
    again = run(source, target)
    assert "0 completed, 0 errors, 18 skipped" in again
    assert records(target) == found


SIMULATE = ("--speculative-algorithm", "NGRAM", "--simulate-accept-length", "3")


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "x", "max_new_tokens": 2},
        {"prompt": "x", "max_new_tokens": 2, "n": 2},
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": OPENAI},
    ],
)
def test_simulated_and_real_results_never_share_a_file(tmp_path: Path, line: object) -> None:
    source = tmp_path / "in.jsonl"
    write_lines(source, [{"prompt": 5}, line])  # an error is of neither kind
    for first, second, words in (
        (SIMULATE, (), "was simulated (--simulate-accept-length) and this run is not"),
        ((), SIMULATE, "is a real result and this run is simulated"),
    ):
        target = tmp_path / f"out{len(first)}.jsonl"
        summary = tmp_path / "summary.json"
        shown = run(source, target, *first, "--summary-json", str(summary))
        assert ("accept lengths are forced" in shown) == bool(first)
        assert json.loads(summary.read_text())["simulated"] == bool(first)
        before = target.read_bytes()
        with start(source, target, *second) as child:
            _, stderr = child.communicate(timeout=60)
        assert child.returncode == 2
        assert f"--output: line 2 of {str(target)!r} {words}" in stderr
        assert "another --output, or delete" in stderr
        assert target.read_bytes() == before
        assert "2 skipped" in run(source, target, *first)


def test_openai_lines_get_openai_results(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    base = {"method": "POST", "url": "/v1/completions"}
    write_lines(
        source,
        [
            {"custom_id": "ok", **base, "body": OPENAI},
            {"custom_id": "bad", **base, "body": {**OPENAI, "max_tokens": -1}},
            {"custom_id": "stream", **base, "body": {**OPENAI, "stream": True}},
            {"custom_id": "url", "method": "POST", "url": "/v1/embeddings", "body": {}},
            {"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": OPENAI},
            {"custom_id": "ok", **base, "body": OPENAI},
            {"custom_id": "extra", **base, "body": OPENAI, "more": 1},
            {
                "custom_id": "chat",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "pycoder", "messages": [{"role": "user", "content": "x"}]},
            },
        ],
    )
    run(source, target)
    found = records(target)
    assert Counter(str(r["custom_id"]) for r in found) == Counter(
        ["ok", "ok", "bad", "stream", "url", "get", "extra", "chat"]
    )
    by_id = {str(r["custom_id"]): r for r in found if r["response"] is not None}
    ok = by_id["ok"]["response"]
    assert isinstance(ok, dict)
    assert ok["status_code"] == 200
    assert ok["body"]["object"] == "text_completion"
    assert ok["body"]["usage"]["completion_tokens"] == 3
    for refused in ("bad", "chat"):
        response = by_id[refused]["response"]
        assert isinstance(response, dict)
        assert response["status_code"] == 400
        assert response["body"]["error"]["message"]
    assert "8 skipped" in run(source, target)


def test_a_killed_run_goes_on_and_loses_and_doubles_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[object] = [{"prompt": [i + 1], "max_new_tokens": 20 + i % 30} for i in range(600)]
    lines[77] = {"prompt": 1}
    lines[78] = {"prompt": [5], "id": "twice"}
    lines[500] = {"prompt": [5], "id": "twice"}
    write_lines(source, lines)
    kills = 0
    for wanted in (40, 200, 390):
        child = start(source, target, "--max-running-requests", "8", step_ms="4")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if target.exists() and target.read_bytes().count(b"\n") >= wanted:
                break
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        kills += child.returncode == -signal.SIGKILL
        with target.open("ab") as file:  # what a write that was cut off leaves
            file.write(b'{"id": 123456, "te')
    assert kills == 3
    run(source, target)
    found = records(target)
    assert len(found) == len(lines)
    ids = Counter(str(r["id"]) for r in found)
    assert ids.pop("twice") == 2
    assert set(ids.values()) == {1}
    assert len(ids) == len(lines) - 2
    assert Counter("error" in r for r in found) == {False: 598, True: 2}
    for record in found:
        if isinstance(record["id"], int) and "error" not in record:
            row = lines[record["id"] - 1]
            assert isinstance(row, dict)
            first = row["prompt"][0]
            assert record["output_ids"] == [first + 1 + k for k in range(row["max_new_tokens"])]


def test_a_dead_core_ends_the_run_and_writes_no_error_lines(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, [{"prompt": [i + 1], "max_new_tokens": 50} for i in range(400)])
    child = start(source, target, "--max-running-requests", "8", step_ms="4")
    while not (target.exists() and target.read_bytes().count(b"\n") >= 20):
        time.sleep(0.01)
    [core] = _children(child.pid)
    os.kill(core, signal.SIGKILL)
    started = time.monotonic()
    _, stderr = child.communicate(timeout=20)
    assert child.returncode == 1
    assert time.monotonic() - started < 5
    assert "error: the engine core" in stderr
    assert "Traceback" not in stderr
    assert not any("error" in r for r in records(target))
    run(source, target)
    assert len({str(r["id"]) for r in records(target)}) == len(records(target)) == 400


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(p) for task in tasks for p in task.read_text().split()]


def test_two_runs_cannot_share_an_output(tmp_path: Path) -> None:
    with (
        open_output(tmp_path / "out.jsonl"),
        pytest.raises(OutriderError, match="another run"),
    ):
        open_output(tmp_path / "out.jsonl")


@pytest.mark.parametrize("content", [b"hello\n", b"[1]\n", b'{"x": 1}\n', b'{"id": 1}\n\n'])
def test_a_foreign_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(content)
    with pytest.raises(OutriderError, match="not an output"):
        open_output(target)
    assert target.read_bytes() == content


def test_a_partial_last_line_is_cut(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(b'{"id": 1}\n{"id": "b"}\n{"id": 3, "line": 3}\n{"id": 4')
    with open_output(target) as output:
        assert output.repaired_bytes == len(b'{"id": 4')
        assert output.finished.has_id(1)
        assert output.finished.has_id("b")
        assert output.finished.has_line(3)
        assert not output.finished.has_id(3)
        output.write(b'{"id": 5}')
    assert target.read_bytes().endswith(b'"line": 3}\n{"id": 5}\n')


def test_lines_take_the_defaults_of_the_command_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_lines(source, [{"prompt": "a"}, {"prompt": "b", "temperature": 0.5}])
    base = SamplingParams(temperature=0.0, max_new_tokens=7)
    first, second = read_items(source, base)
    assert isinstance(first, PromptItem)
    assert isinstance(second, PromptItem)
    assert (first.params.temperature, second.params.temperature) == (0.0, 0.5)
    assert first.params.max_new_tokens == second.params.max_new_tokens == 7


@given(st.one_of(st.binary(max_size=80), st.text(max_size=80).map(str.encode)))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_parsing_a_line_never_raises(line: bytes) -> None:
    item = parse_line(3, line, SamplingParams())
    assert item.line == 3
    assert isinstance(item, PromptItem | OpenAIItem | BadItem)


def test_usage_errors(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    for extra, message in (
        (["--input", "none.jsonl", "--output", "x"], "is not a file"),
        (["--input", str(source), "--output", str(tmp_path)], "is a folder"),
        (["--input", str(source), "--output", str(source)], "same file"),
        (["--input", str(source), "--output", "/no/such/x"], "does not exist"),
    ):
        done = subprocess.run(
            [sys.executable, str(FAKE_CLI), "2", "1", "run", "--model", "pycoder", *extra],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
