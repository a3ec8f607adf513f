"""Benchmarks: the statistics, and both commands over scripted cores."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from outrider.engine_core.messages import CoreStats
from outrider.frontend.bench.measure import Timing, core_cost, speculation, spread
from outrider.frontend.bench.prompts import load_prompts
from outrider.frontend.flags import UsageError

from .server_process import FAKE_CLI, fake_server

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "pycoder_prompts.jsonl"


def counters(**values: object) -> CoreStats:
    names = [f.name for f in msgspec.structs.fields(CoreStats)]
    zero: dict[str, object] = {n: () if n.endswith("per_pos") else 0 for n in names}
    tag = CoreStats.__struct_config__.tag
    return msgspec.convert([tag, *((zero | values)[n] for n in names)], CoreStats)


def test_a_gap_is_shared_by_the_tokens_of_its_chunk() -> None:
    timing = Timing(sent=10.0)
    timing.chunk(10.5, 2)
    timing.chunk(11.5, 4)
    timing.chunk(11.6, 0)
    timing.chunk(12.0, 1)
    assert timing.gaps == [0.25, 0.25, 0.25, 0.25, 0.5]
    assert (timing.first, timing.last, timing.tokens) == (10.5, 12.0, 7)


def test_percentiles_are_in_milliseconds() -> None:
    found = spread([i / 1000 for i in range(100, 0, -1)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max) == pytest.approx((51, 91, 100, 100))
    assert found.mean == pytest.approx(50.5)
    assert spread([]) is None


def test_acceptance_is_a_difference_of_counters() -> None:
    before = counters(
        spec_drafts=10,
        spec_verify_tokens=30,
        spec_draft_tokens=50,
        spec_accepted_tokens=20,
        spec_accepted_per_pos=(8,),
        spec_drafted_per_pos=(10,),
        plain_rows=5,
    )
    after = counters(
        spec_drafts=30,
        spec_verify_tokens=90,
        spec_draft_tokens=150,
        spec_accepted_tokens=60,
        spec_accepted_per_pos=(18, 6, 0),
        spec_drafted_per_pos=(30, 8, 0),
        plain_rows=15,
    )
    found = speculation(before, after)
    assert found.accept_length == 3.0
    assert found.accept_rate == 0.4
    assert found.accept_rate_per_position == (0.5, 0.75)
    assert found.length_0_share == pytest.approx(1 / 3)
    nothing = speculation(after, after)
    assert (nothing.accept_length, nothing.accept_rate, nothing.length_0_share) == (None, None, 0)


def test_cost_is_a_step() -> None:
    cost = core_cost(counters(steps=5, plan_cpu=1.0), counters(steps=15, plan_cpu=1.001))
    assert cost.steps == 10
    assert cost.plan_us == pytest.approx(100.0)
    assert core_cost(counters(), counters()).plan_us == 0.0


def test_prompts_are_chosen_by_kind(tmp_path: Path) -> None:
    edits = load_prompts(str(PROMPTS), "edit", 3, 17)
    assert [(p.kind, p.max_tokens) for p in edits] == [("edit", 17)] * 3
    assert len(load_prompts(str(PROMPTS), None, None, None)) == 144
    broken = tmp_path / "p.jsonl"
    broken.write_text('{"id": "a", "kind": "k", "prompt": "x"}\n\n{"id": 1}\n')
    for path, kind, message in (
        (str(broken), None, "line 3"),
        (str(tmp_path / "none"), None, "cannot read"),
        (str(PROMPTS), "poem", "completion"),
    ):
        with pytest.raises(UsageError, match=message):
            load_prompts(path, kind, None, None)


def bench(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(FAKE_CLI), "2", "1", "bench", *args],
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_serving_measures_the_baseline_beside_the_server(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    common = ["serve", "--prompts", str(PROMPTS), "--num-prompts", "6", "--max-new-tokens", "30"]
    with (
        fake_server("--speculative-algorithm", "NGRAM", per_step=3, step_ms=4) as measured,
        fake_server(per_step=1, step_ms=4) as baseline,
    ):
        both = ["--base-url", measured.url, "--baseline-url", baseline.url]
        done = bench(*common, *both, "--concurrency", "3", "--json", str(file))
        assert done.returncode == 0, done.stderr
        alone = bench(*common, "--base-url", baseline.url, "--no-baseline", "--request-rate", "50")
        assert alone.returncode == 0, alone.stderr
    report = json.loads(file.read_text())
    for side in ("measured", "baseline"):
        assert report[side]["completed"] == 6
        assert report[side]["total_output_tokens"] == 180
        assert report[side]["ttft_ms"]["p50"] > 0
    assert report["speedup"] > 1.5
    assert report["accept_length"] == 3.0
    assert report["baseline"]["speculation"]["accept_length"] is None
    assert report["measured"]["concurrency"] <= 3
    assert "Accept length:" in done.stdout
    assert "Speedup (output throughput):" in done.stdout
    assert "no baseline was measured" in alone.stdout


def test_forced_accept_lengths_are_marked_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    flags = ["--speculative-algorithm", "NGRAM", "--simulate-accept-length", "3"]
    with fake_server(*flags) as server:
        assert server.text().count("simulated: accept lengths are forced") == 1
        done = bench(
            *("serve", "--prompts", str(PROMPTS), "--num-prompts", "2", "--max-new-tokens", "4"),
            *("--base-url", server.url, "--no-baseline", "--json", str(file)),
        )
        assert done.returncode == 0, done.stderr
        with httpx.Client(base_url=server.url, timeout=20, verify=False) as client:
            assert client.get("/server_info").json()["simulated"] is True
            assert "outrider:spec_simulated 1.0" in client.get("/metrics").text
            body = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
            answer = client.post("/generate", json=body).json()
            assert answer["meta_info"]["simulated"] is True
            openai = {"model": "pycoder", "prompt": "a", "max_tokens": 2}
            assert client.post("/v1/completions", json=openai).json()["simulated"] is True
    report = json.loads(file.read_text())
    assert report["simulated"] is report["measured"]["simulated"] is True
    assert "accept lengths are forced" in done.stdout


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_generate_says_that_it_simulates(args: list[str]) -> None:
    flags = ["--speculative-algorithm", "NGRAM", "--simulate-accept-length", "3"]
    command = ["generate", "--model", "pycoder", "--prompt", "x", "--max-new-tokens", "3", *args]
    marks = []
    for extra in (flags, flags[:2]):
        done = subprocess.run(
            [sys.executable, str(FAKE_CLI), "2", "1", *command, *extra],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "accept lengths are forced" not in done.stdout
        marks.append(done.stderr.count("outrider: simulated: accept lengths are forced"))
    assert marks == [1, 0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["offline", "--json", "/no/such/x"], "--json: cannot write '/no/such/x': the folder"),
        (["offline", "--json", "/"], "--json: cannot write '/': it is a folder"),
        (["offline", "--skip-tokenizer-init"], "skip_tokenizer_init: the prompts are text"),
        (["serve", "--json", "/no/such/x"], "--json: cannot write"),
        (["serve", "--skip-tokenizer-init"], "skip_tokenizer_init: the prompts are text"),
        (
            ["serve", "--base-url", "http://x", "--no-baseline", "--page-size", "1"],
            "page_size: is for --model",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before(args: list[str], message: str) -> None:
    model = [] if "--base-url" in args else ["--model", "pycoder"]
    done = bench(args[0], *model, "--prompts", str(PROMPTS), *args[1:])
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert "round" not in done.stderr
    assert done.stdout == ""


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    done = bench(
        *("serve", "--prompts", str(PROMPTS), "--base-url", "http://127.0.0.1:9"), "--no-baseline"
    )
    assert done.returncode == 1
    assert "no OpenAI-compatible server answers" in done.stderr
    assert "Traceback" not in done.stderr


def test_offline_without_an_algorithm_measures_the_baseline_only(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    done = bench(
        *("offline", "--model", "pycoder", "--prompts", str(PROMPTS), "--num-prompts", "3"),
        *("--max-new-tokens", "8", "--repeat", "2", "--batch-size", "2", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert (report["speculative"], report["speedup"]) == (None, None)
    assert report["baseline"]["output_tokens"] == 24
    assert len(report["baseline"]["output_tokens_per_s_rounds"]) == 2
    assert "round 0, not counted, baseline: " in done.stderr
    assert "only the baseline " in " ".join(done.stdout.split())


def test_offline_without_an_algorithm_has_two_sides_where_grammars_force(tmp_path: Path) -> None:
    file, prompts = tmp_path / "b.json", PROMPTS.parent / "schema_prompts.jsonl"
    done = bench(
        *("offline", "--model", "pycoder", "--prompts", str(prompts), "--num-prompts", "2"),
        *("--max-new-tokens", "24", "--repeat", "1", "--batch-size", "2", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["speculative"]["drafter"] is None
    assert report["speculative"]["output_tokens"] == report["baseline"]["output_tokens"] == 48
    assert report["differing_outputs"] == 0
    assert "forced drafts" in done.stdout
