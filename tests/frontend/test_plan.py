"""``outrider plan``: the table, the JSON, and refusals with numbers."""

import json
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


def test_a_configuration_alone_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert run("--model", str(QWEN), "--gpu-memory", "139", "--json", str(file)) == 0
    text = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["weight_bytes"] == 16_381_470_720
    assert (found["device"], found["dtype"]) == ("cuda", "bfloat16")
    assert "weights                       15.256 GiB" in text
    assert "CUDA context and kernels       0.586 GiB" in text
    assert "copies while loading" in text
    assert "147,456 bytes" in text


def test_what_does_not_fit_ends_with_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", str(QWEN), "--gpu-memory", "16") == 2
    assert "beside 15.256 GiB of weights" in capsys.readouterr().err
    assert run("--model", "pycoder", "--device", "cpu", "--memory", "1", "--dtype", "float16") == 2
    assert "a CPU computes in float32" in capsys.readouterr().err
    assert run("--model", "pycoder") == 2
    assert "--gpu-memory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--model", "pycoder", "--gpu-memory", "-1")


def test_an_unsupported_architecture_is_the_command_lines_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = json.loads((QWEN / "config.json").read_text()) | {"architectures": ["Mamba"]}
    (tmp_path / "config.json").write_text(json.dumps(made))
    assert run("--model", str(tmp_path), "--gpu-memory", "139") == 2
    assert "'Mamba' is not supported" in capsys.readouterr().err


def test_the_embedded_model_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "pycoder", "--device", "cpu", "--memory", "8") == 0
    assert "pycoder in float32 on cpu" in capsys.readouterr().out


def test_a_folder_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((QWEN / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"short")
    args = ["--model", str(tmp_path), "--gpu-memory", "139"]
    assert run(*args) == 1
    assert "not a safetensors file" in capsys.readouterr().err
    assert run(*args, "--load-format", "dummy") == 0


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 1000", 1000 << 20), ("echo nonsense", None), ("exit 1", None), ("true", None)],
)
def test_the_gpu_is_asked(tmp_path: Path, script: str, expected: int | None) -> None:
    tool = tmp_path / "nvidia-smi"
    assert plan.gpu_memory() is None
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert plan.gpu_memory() == expected
