"""``outrider bench step`` on a CPU: the numbers that it writes, and what it refuses."""

import json
from pathlib import Path

import pytest

from outrider.engine_core.step_bench import shown_rate
from outrider.frontend import cli

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
FLAGS = ("--load-format", "dummy", "--device", "cpu", "--num-threads", "1", "--page-size", "16")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def run(*args: str) -> int:
    return cli.main(["bench", "step", *args])


def test_steps_are_measured_beside_their_floor(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "steps.json"
    sizes = ("--batch-size", "1", "3", "--context", "40", "--draft-lengths", "0", "3")
    status = run("--model", tiny, *sizes, "--steps", "6", *FLAGS, "--json", str(file))
    shown = capsys.readouterr()
    assert status == 0, shown.err
    report = json.loads(file.read_text())
    assert report["command"].startswith("outrider")
    assert (report["device"], report["dtype"]) == ("cpu", "float32")
    assert report["copy_gb_per_s"] > 0.1
    assert report["matmul_tflop_per_s"] > 0.001
    assert report["weight_bytes"] - report["streamed_bytes"] == 512 * 64 * 4
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert report["config"]["max_running_requests"] == 3
    rows = report["rows"]
    assert [(r["mode"], r["batch_size"], r["draft_length"]) for r in rows] == [
        ("engine", 1, 0),
        ("engine", 3, 0),
        ("device_only", 1, 0),
        ("device_only", 3, 0),
        ("device_only", 1, 3),
        ("device_only", 3, 3),
    ]
    for row in rows:
        assert 0 < row["wall_ms"] <= row["wall_p90_ms"]
        assert row["device_ms"] > 0
        assert row["idle_ms"] == pytest.approx(row["wall_mean_ms"] - row["device_ms"])
        assert row["ratio"] == pytest.approx(row["wall_ms"] / row["floor_ms"])
        assert row["context"] == 40 < row["mean_context"] < 100
        read = row["kv_bytes"] / report["kv_bytes_per_token"] / row["batch_size"]
        assert read == pytest.approx(row["mean_context"], abs=0.01)
        assert row["floor_ms"] >= report["streamed_bytes"] / report["copy_gb_per_s"] / 1e6
        # No CUDA graphs here.
        assert row["graph_replays"] is row["bare_ms"] is row["gap_ms"] is None
        assert (row["verify_over_plain"] is None) == (row["draft_length"] == 0)
        assert (row["plan_us"] is None) == (row["mode"] == "device_only")
    assert rows[0]["tokens_per_s"] == pytest.approx(rows[0]["steps_per_s"])
    assert rows[3]["tokens_per_s"] == pytest.approx(3 * rows[3]["steps_per_s"])
    assert rows[5]["operations"] == 4 * rows[3]["operations"]
    assert "device_only" in shown.out
    assert "max_total_tokens=" in shown.err


def test_prefill_is_measured_beside_the_matmul_rate(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prefill.json"
    sizes = ("--batch-size", "2", "--prefill-lengths", "50", "7", "--chunked-prefill-size", "32")
    status = run("--model", tiny, *sizes, *FLAGS, "--json", str(file))
    shown = capsys.readouterr()
    assert status == 0, shown.err
    report = json.loads(file.read_text())
    assert report["rows"] == []
    assert report["memory"] is None
    assert [row["prompt_tokens"] for row in report["prefills"]] == [50, 7]
    for row, steps in zip(report["prefills"], (4, 1), strict=True):
        tokens = row["prompt_tokens"]
        assert (row["batch_size"], row["chunk_tokens"], row["steps"]) == (2, 32, steps)
        assert row["device_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(2 * tokens / row["wall_ms"] * 1e3)
        layer = 64 * (64 + 128) + 3 * 64 * 128
        assert row["linear_operations"] == 2 * 2 * (tokens * 2 * layer + 512 * 64)
        assert row["attention_operations"] == 2 * 2 * 4 * (tokens * (tokens + 1) // 2) * 64
        done = (row["linear_operations"] + row["attention_operations"]) * 1e-9 / row["wall_ms"]
        assert row["tflop_per_s"] == pytest.approx(done)
        assert row["matmul_share"] == pytest.approx(done / report["matmul_tflop_per_s"])
    assert "prefill" in shown.out
    assert "draft" not in shown.out


DRAFT = TINY | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 128,
    "target_hidden_size": 64,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
}


def test_rounds_are_measured_beside_plain_steps(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft, file = tmp_path / "draft", tmp_path / "rounds.json"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(DRAFT))
    rounds = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model", str(draft))
    sizes = ("--batch-size", "1", "3", "--context", "40", "--steps", "6")
    shape = ("--speculative-num-steps", "3", "--simulate-accept-length", "3.0")
    status = run("--model", tiny, *rounds, *sizes, *shape, *FLAGS, "--json", str(file))
    shown = capsys.readouterr()
    assert status == 0, shown.err
    report = json.loads(file.read_text())
    assert report["config"]["speculative_length_policy"] == "fixed"
    assert report["config"]["speculative_num_draft_tokens"] == 4
    rows = report["rows"]
    assert [(r["mode"], r["batch_size"], r["draft_length"], r["simulated"]) for r in rows] == [
        ("engine", 1, 0, False),
        ("engine", 3, 0, False),
        ("round", 1, 3, True),
        ("round", 3, 3, True),
    ]
    layer = 2 * 64 * (64 + 32) + 3 * 64 * 128 + 64 * (64 + 64)
    drafts = 3 * (layer + 128 * 64) + 2 * 64 * 64
    for plain, row in zip(rows[:2], rows[2:], strict=True):
        assert row["verify_over_plain"] == pytest.approx(row["wall_ms"] / plain["wall_ms"])
        assert row["ratio"] == pytest.approx(row["wall_ms"] / row["floor_ms"])
        assert row["weight_bytes"] - plain["weight_bytes"] == 4 * drafts
        assert row["kv_bytes"] > plain["kv_bytes"]
        assert 2.0 <= row["accept_length"] <= 4.0
        assert plain["accept_length"] is None
        assert row["bare_ms"] is None
    assert "simulated" in shown.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--speculative-algorithm", "NGRAM"), "verifies random drafts"),
        (("--speculative-config", '{"method": "ngram"}'), "verifies random drafts"),
        (("--simulate-accept-length", "3"), "needs --speculative-algorithm"),
        (("--speculative-num-steps", "3"), "needs --speculative-algorithm"),
        (("--speculative-algorithm", "EAGLE3", "--draft-lengths", "3"), "leave one out"),
    ],
)
def test_speculation_is_that_of_a_draft_model(
    tiny: str, args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", tiny, *FLAGS, *args) == 2
    assert words in capsys.readouterr().err


def test_a_draft_that_is_not_there_is_a_usage_error(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", tiny, *FLAGS, "--speculative-algorithm", "EAGLE3", "--steps", "2") == 2
    assert "speculative_draft_model_path: EAGLE3 needs one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--context", "500"), "past the model's 512"),
        (("--prefill-lengths", "512"), "prefill_lengths: 512: a prompt and its token are past"),
        (("--dtype", "float16"), "a CPU computes in float32"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny: str, args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", tiny, *FLAGS, *args) != 0
    shown = capsys.readouterr().err
    assert words in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("max_running_requests", 3, "sets it by itself"),
        ("max_total_tokens", 64, "sets it by itself"),
        ("cuda_graph_max_bs", 4, "sets it by itself"),
        ("tokenizer_path", "x", "runs on token ids"),
        ("speculative_length_policy", "fixed", "drafts in every step"),
        ("speculative_ngram_capacity", 50, "verifies random drafts"),
    ],
)
def test_what_is_of_no_use_is_not_offered_and_refused(
    tiny: str,
    tmp_path: Path,
    flag: str,
    value: object,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({flag: value}))
    dashed = "--" + flag.replace("_", "-")
    for given in (("--config", str(file)), (dashed, str(value))):
        assert run("--model", tiny, *given) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--help")
    shown = capsys.readouterr().out
    assert f"\n  {dashed}" not in shown
    assert "\n  --page-size" in shown


def test_a_wrong_model_or_file_is_a_usage_error(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", str(tmp_path / "none"), *FLAGS) == 2
    assert "error: model: '" in capsys.readouterr().err
    assert run("--model", tiny, *FLAGS, "--json", str(tmp_path / "none" / "x")) == 2
    shown = capsys.readouterr()
    assert "--json: cannot write" in shown.err
    assert "copy" not in shown.err + shown.out
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["T5Model"]}))
    assert run("--model", tiny, *FLAGS) == 2
    assert "T5Model" in capsys.readouterr().err


def test_json_may_go_to_standard_output(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--prefill-lengths", "8", "--json", "-")
    assert run("--model", tiny, *sizes, *FLAGS) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["prefills"][0]["prompt_tokens"] == 8
    assert "of matmul" in shown.err


def test_small_rates_keep_their_digits() -> None:
    assert [shown_rate(v) for v in (0.0412, 0.000123, 9.876, 12.34, 712.3)] == [
        *("0.0412", "0.000123", "9.88", "12.3", "712.3")
    ]


def test_draft_lengths_have_a_limit(tiny: str) -> None:
    with pytest.raises(SystemExit):
        run("--model", tiny, "--draft-lengths", "64")
