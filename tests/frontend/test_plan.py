"""``outrider plan``: the table, the JSON, and refusals with numbers."""

import json
import shutil
from pathlib import Path

import pytest

from outrider.frontend import cli
from outrider.frontend.commands import plan

QWEN = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-8b"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def run(*args: str) -> int:
    return cli.main(["plan", *args])


DUMMY = ["--model", str(QWEN), "--load-format", "dummy"]


def test_a_configuration_alone_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert run(*DUMMY, "--gpu-memory", "139", "--json", str(file)) == 0
    text = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["weight_bytes"] == 16_381_470_720
    assert (found["device"], found["dtype"]) == ("cuda", "bfloat16")
    assert "weights                       15.256 GiB" in text
    assert "CUDA context and kernels       0.649 GiB" in text
    assert "copies while loading" in text
    assert "147,456 bytes" in text
    assert "draft weights" not in text, "there are none"


def test_a_draft_model_has_lines_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    draft = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model", f"{QWEN}-eagle3"]
    tree = ["--speculative-num-steps", "5", "--speculative-eagle-topk", "4"]
    tree += ["--speculative-num-draft-tokens", "16"]
    assert run(*DUMMY, *draft, *tree, "--gpu-memory", "139", "--json", str(file)) == 0
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "draft weights                  0.744 GiB" in text
    for line in ("draft activations", "draft graphs"):
        assert f"\n{line} " in text
    assert "draft KV a token               4,096 bytes" in text
    token = found["kv_bytes_per_token"] + found["draft_kv_bytes_per_token"]
    assert found["kv_bytes"] == (found["num_tokens"] + 16) * token
    assert run(*DUMMY, "--speculative-algorithm", "EAGLE3", "--gpu-memory", "139") == 2
    assert "speculative_draft_model_path: EAGLE3 needs one" in capsys.readouterr().err
    stored = ["--speculative-draft-load-format", "auto"]
    assert run(*DUMMY, *draft, *stored, "--gpu-memory", "139") == 2
    shown = capsys.readouterr().err
    assert "speculative_draft_model_path: " in shown
    assert "use --speculative-draft-load-format dummy" in shown
    args = [*DUMMY, *draft, "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "9"]
    assert run(*args, "--gpu-memory", "139") == 0
    assert "warning: speculative_num_draft_tokens: 9 becomes 3" in capsys.readouterr().err


def test_a_dash_is_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--model", "pycoder", "--memory", "8", "--json", "-") == 0
    written = capsys.readouterr()
    assert json.loads(written.out)["device"] == "cpu"
    assert "pycoder in float32 on cpu" in written.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "make_plan", lambda *args: pytest.fail("it was planned"))
    for path in (tmp_path, tmp_path / "none" / "plan.json"):
        assert run("--model", "pycoder", "--memory", "8", "--json", str(path)) == 2
        assert "--json: cannot write" in capsys.readouterr().err


def test_what_does_not_fit_ends_with_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*DUMMY, "--gpu-memory", "16") == 2
    assert "beside 15.256 GiB of weights" in capsys.readouterr().err
    assert run("--model", "pycoder", "--gpu-memory", "0.1") == 2
    said = capsys.readouterr().err
    assert "device: cuda: the driver's context and the kernels take 0.649 GiB" in said
    assert "but 0.100 GiB are free" in said


@pytest.mark.parametrize("text", ["-1", "0", "inf", "1e30", "nan"])
def test_the_bounds_of_memory_are_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--gpu-memory", "--memory"):
        with pytest.raises(SystemExit) as ended:
            run("--model", "pycoder", flag, text)
        assert ended.value.code == 2
        expected = f"argument {flag}: must be above 0 and at most 1048576 GiB, got {text}"
        assert expected in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--model", "pycoder", "--memory", "much")
    assert "must be a number of GiB, got 'much'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "device"),
    [
        ([], "cpu"),
        (["--device", "cpu"], "cpu"),
        (["--memory", "8"], "cpu"),
        (["--device", "cpu", "--memory", "8"], "cpu"),
        (["--gpu-memory", "24"], "cuda"),
        (["--device", "cuda", "--gpu-memory", "24"], "cuda"),
    ],
)
def test_without_a_gpu(
    args: list[str],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plan, "free_memory", lambda: 8 << 30)
    assert run("--model", "pycoder", *args) == 0
    text = capsys.readouterr().out
    assert f" on {device}," in text
    assert ("CUDA" in text) == (device == "cuda")
    assert ("8.000 GiB  weights and KV may take 0.5 of it" in text) == (device == "cpu")


@pytest.mark.parametrize(
    ("args", "device"),
    [([], "cuda"), (["--device", "cpu"], "cpu"), (["--memory", "8"], "cpu")],
)
def test_with_a_gpu(
    args: list[str], device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 24000\n")
    tool.chmod(0o755)
    assert run("--model", "pycoder", *args) == 0
    assert f" on {device}," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--device", "cuda"], "--gpu-memory: no GPU to ask; give a GPU's free memory in GiB"),
        (["--device", "cpu", "--gpu-memory", "8"], "is not for --device cpu, whose flag is"),
        (["--device", "cuda", "--memory", "8"], "whose flag is --gpu-memory"),
        (["--device", "cpu", "--memory", "1", "--dtype", "float16"], "a CPU computes in float32"),
        (["--disable-cuda-graph"], "a CPU has no CUDA graphs"),
    ],
)
def test_devices_that_contradict(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", "pycoder", *args) == 2
    assert words in capsys.readouterr().err


def test_the_model_is_looked_at_before_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path, *args: str) -> str:
        assert run("--model", str(folder), "--device", "cuda", *args) == 2
        return capsys.readouterr().err

    assert "error: model: " in refused(tmp_path / "none")
    assert "has no config.json" in refused(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{")
    assert "config.json" in refused(tmp_path)
    made = json.loads((QWEN / "config.json").read_text())
    config.write_text(json.dumps(made | {"architectures": ["Mamba"]}))
    assert "'Mamba' is not supported" in refused(tmp_path)
    config.write_text(json.dumps(made))
    assert "use --load-format dummy" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert "not a safetensors file" in refused(tmp_path)
    assert "no GPU to ask" in refused(tmp_path, "--load-format", "dummy")


def test_a_checkpoint_that_could_not_be_loaded_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = Path(__file__).parents[2] / "models"
    memory = ["--memory", "8", "--device", "cpu"]

    def copied(name: str) -> Path:
        return Path(shutil.copytree(models / name, tmp_path / name, dirs_exist_ok=True))

    def refused(*args: str) -> str:
        assert run(*args, *memory) == 2
        return capsys.readouterr().err

    target = copied("pycoder-11m")
    assert run("--model", str(target), *memory) == 0
    shard = target / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    said = refused("--model", str(target))
    assert "error: model: " in said
    assert "model-00002-of-00002.safetensors: is truncated or damaged" in said
    target = copied("pycoder-11m")
    config = json.loads((target / "config.json").read_text())
    layers = config["num_hidden_layers"]
    for change, words in (
        ({"num_hidden_layers": layers + 1}, "the checkpoint lacks tensor 'model.layers."),
        ({"num_hidden_layers": layers - 1}, "are in the checkpoint but not in the model"),
        ({"intermediate_size": 8}, "config.json asks for [8, "),
    ):
        (target / "config.json").write_text(json.dumps(config | change))
        assert words in refused("--model", str(target))
    draft = copied("pycoder-11m-eagle3")
    args = ["--model", "pycoder", "--speculative-algorithm", "EAGLE3"]
    args += ["--speculative-draft-model-path", str(draft)]
    assert run(*args, *memory) == 0
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"intermediate_size": 8}))
    said = refused(*args)
    assert "error: speculative_draft_model_path: " in said
    assert "config.json asks for [8, " in said


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 1000", 1000 << 20), ("echo nonsense", None), ("exit 1", None), ("true", None)],
)
def test_the_gpu_is_asked(tmp_path: Path, script: str, expected: int | None) -> None:
    tool = tmp_path / "nvidia-smi"
    assert plan.gpu_free_memory() is None
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert plan.gpu_free_memory() == expected


@pytest.mark.parametrize(
    ("visible", "asked"),
    [(None, "--id=0"), ("1,0", "--id=1"), ("GPU-5f", "--id=GPU-5f"), ("", None), ("-1", None)],
)
def test_the_gpu_that_cuda_sees_is_asked(
    visible: str | None, asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, said = tmp_path / "nvidia-smi", tmp_path / "said"
    tool.write_text(f'#!/bin/sh\necho "$@" > {said}\necho 1000\n')
    tool.chmod(0o755)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert plan.gpu_free_memory() == (None if asked is None else 1000 << 20)
    assert said.exists() == (asked is not None)
    if asked is not None:
        assert said.read_text().split()[-1] == asked
