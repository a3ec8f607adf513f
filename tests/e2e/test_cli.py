"""The command-line contract on the embedded model: names, JSON keys, exit statuses."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "pycoder_prompts.jsonl"
FAST = ["--model", "pycoder", "--num-threads", "1", "--max-running-requests", "4"]
NGRAM = ["--speculative-algorithm", "NGRAM"]
META = {
    *("spec_accept_length", "spec_accept_rate", "spec_verify_ct", "cached_tokens"),
    *("spec_num_correct_drafts", "spec_num_proposed_drafts", "prompt_tokens", "e2e_latency"),
}
REPEAT = "x = [1, 2, 3]\ny = [1, 2, 3]\nx = [1, 2, 3]\ny = [1, 2, 3]\nx = ["


def outrider(
    *args: str, env: dict[str, str] | None = None, stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "outrider", *args],
        capture_output=True,
        text=True,
        timeout=120,
        input=stdin,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | (env or {}),
    )


def test_generate_prints_one_json_object(tmp_path: Path) -> None:
    sampling = ["--max-new-tokens", "48", "--temperature", "0", "--json"]
    fixed = ["--speculative-length-policy", "fixed"]
    spec = outrider("generate", *FAST, *NGRAM, *fixed, "--prompt", REPEAT, *sampling)
    assert spec.returncode == 0, spec.stderr
    found = json.loads(spec.stdout)
    assert set(found) == {
        *("text", "output_ids", "prompt_tokens", "completion_tokens", "finish_reason"),
        "meta_info",
    }
    assert set(found["meta_info"]) >= META
    assert found["completion_tokens"] == len(found["output_ids"]) == 48
    assert found["finish_reason"] == "length"
    assert found["meta_info"]["spec_verify_ct"] > 0
    assert "outrider configuration: model=pycoder" in spec.stderr
    file = tmp_path / "prompt.txt"
    file.write_text(REPEAT)
    plain = outrider("generate", *FAST, "--prompt-file", str(file), *sampling)
    assert json.loads(plain.stdout)["output_ids"] == found["output_ids"]


def test_seeded_sampling_repeats_and_standard_input_is_a_prompt() -> None:
    args = ["generate", *FAST, "--max-new-tokens", "16", "--temperature", "0.9", "--seed", "5"]
    first = outrider(*args, stdin="def f(")
    second = outrider(*args, *NGRAM, "--prompt", "def f(")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout


def test_a_trace_of_a_drafter_on_the_device_replays(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    args = ["--prompt", REPEAT, "--max-new-tokens", "16", "--temperature", "0"]
    eagle = ["--speculative-algorithm", "EAGLE3"]
    recorded = outrider("generate", *FAST, *eagle, *args, env={"OUTRIDER_TRACE": str(trace)})
    assert recorded.returncode == 0, recorded.stderr
    replayed = outrider("replay", str(trace))
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    assert replayed.stdout.count("all the same") == 2


def test_a_trace_replays_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    args = ["--prompt", REPEAT, "--max-new-tokens", "24", "--temperature", "0"]
    recorded = outrider("generate", *FAST, *NGRAM, *args, env={"OUTRIDER_TRACE": str(trace)})
    assert recorded.returncode == 0, recorded.stderr
    replayed = outrider("replay", str(trace))
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    assert replayed.stdout.count("all the same") == 2
    content = bytearray(trace.read_bytes())
    trace.write_bytes(content[:-7])
    cut = outrider("replay", "--core-only", str(trace))
    assert cut.returncode == 1
    assert "error: " in cut.stderr
    trace.write_bytes(b"something else")
    assert "not an Outrider trace" in outrider("replay", str(trace)).stderr
    assert outrider("replay", str(tmp_path / "none")).returncode == 1


def test_run_answers_every_line(tmp_path: Path) -> None:
    source, target, summary = (tmp_path / n for n in ("in.jsonl", "out.jsonl", "s.json"))
    body = {"model": "pycoder", "prompt": "x = ", "max_tokens": 4}
    lines: list[dict[str, object]] = [
        {"prompt": f"def f{i}(", "max_new_tokens": 8, "temperature": 0, "id": f"p{i}"}
        for i in range(6)
    ]
    lines.append({"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body})
    lines.append({"prompt": "x", "temperature": -1})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["run", *FAST, *NGRAM, "--input", str(source), "--output", str(target)]
    done = outrider(*args, "--summary-json", str(summary))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(found) == 8
    for record in found:
        if str(record["id"]).startswith("p"):
            assert set(record) == {"id", "text", "output_ids", "finish_reason", "meta_info"}
    assert [set(r) for r in found if r["id"] == 8] == [{"id", "error"}]
    [openai] = [r for r in found if r.get("custom_id") == "c"]
    assert openai["response"]["body"]["usage"]["completion_tokens"] == 4
    counts = json.loads(summary.read_text())
    assert (counts["completed"], counts["errors"]) == (7, 1)


def test_bench_offline_writes_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    small = ["--num-prompts", "3", "--max-new-tokens", "24", "--repeat", "1", "--kind", "edit"]
    done = outrider(
        *("bench", "offline", *FAST, *NGRAM, "--prompts", str(PROMPTS), *small),
        *("--batch-size", "2", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert {"baseline", "speculative", "speedup", "accept_length"} <= set(report)
    assert report["baseline"]["output_tokens"] == report["speculative"]["output_tokens"] == 72
    assert report["differing_outputs"] == 0
    assert report["baseline"]["speculation"]["length_0_share"] == 1.0
    for side in ("baseline", "speculative"):
        assert report[side]["output_tokens_per_s"] > 0
        assert set(report[side]["ttft_ms"]) == {"mean", "p50", "p90", "p99", "max"}
        assert report[side]["core"]["plan_us"] > 0
    assert "speedup" in done.stdout


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["generate", "--model", "no/such-model", "--prompt", "x"], 2, "Looked for"),
        (["generate", "--model", "pycoder", "--prompt", "x", "--page-size", "3"], 2, "page_size"),
        (["generate", "--model", "pycoder", "--prompt-file", "/none"], 2, "cannot read"),
        (["generate", "--model", "pycoder", "--prompt", "x", "--nope"], 2, "unrecognized"),
        (["generate", "--prompt", "x"], 2, "--model is required"),
        (["generate", *FAST, "--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", *FAST, "--prompt", "x", "--context-length", "99999"], 2, "context_length"),
        (["generate", *FAST, "--prompt", "", "--max-new-tokens", "1"], 2, "prompt: is empty"),
        (["bench"], 2, "required: what"),
        (["bench", "offline", *FAST, "--prompts", "/none"], 2, "cannot read"),
        (["bench", "offline", *FAST, "--prompts", str(PROMPTS), "--kind", "x"], 2, "no prompt"),
        (["bench", "serve", "--prompts", str(PROMPTS), "--base-url", "http://x"], 2, "baseline"),
        (["bench", "serve", "--prompts", str(PROMPTS)], 2, "--base-url"),
        (["frobnicate"], 2, "invalid choice"),
        ([], 2, "usage"),
    ],
)
def test_errors_are_one_clear_line(args: list[str], status: int, message: str) -> None:
    done = outrider(*args)
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_truncated_checkpoint_is_a_clear_error(tmp_path: Path) -> None:
    from outrider.engine_core.model_path import resolve_model

    for file in resolve_model("pycoder").glob("*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = next(iter(tmp_path.glob("*.safetensors")))
    shard.write_bytes(shard.read_bytes()[:1000])
    done = outrider("generate", "--model", str(tmp_path), "--prompt", "x")
    assert done.returncode == 2
    assert shard.name in done.stderr
    assert "Traceback" not in done.stderr


def test_capabilities_version_and_help() -> None:
    table = json.loads(outrider("capabilities", "--json").stdout)
    assert {"feature", "ngram", "none"} <= set(table[0])
    assert "| feature |" in outrider("capabilities").stdout
    assert outrider("--version").stdout.startswith("outrider ")
    started = time.monotonic()
    assert "commands:" in outrider("--help").stdout
    assert time.monotonic() - started < 5
    for command in ("serve", "generate", "run", "replay", "capabilities"):
        assert "--help" in outrider(command, "--help").stdout


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom outrider.frontend.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "bad = {'torch', 'numpy', 'zmq', 'msgspec', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
