"""``outrider train``: its flags, and a whole run that asks the engine for the target's text."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outrider.engine.training.interruption import Interruption
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.model_path import resolve_draft
from outrider.engine_core.train_spec import TrainSpec
from outrider.frontend import train_engine
from outrider.frontend.cli import main
from outrider.frontend.commands.train import _parser, spec_from
from outrider.frontend.llm import LLM
from outrider.frontend.train_flags import FLAGS

LEAST = ["--algorithm", "EAGLE3", "--model", "m", "--data", "d", "--output", "o"]


def test_every_field_has_a_flag_and_keeps_its_default() -> None:
    assert {flag.name for flag in FLAGS} == set(TrainSpec.__struct_fields__)
    spec = spec_from(_parser().parse_args([*LEAST, "--steps", "3"]))
    assert spec == TrainSpec(algorithm="EAGLE3", model="m", data=("d",), output="o", steps=3)
    given = ["--feature-layers", "1", "3", "--no-compile", "--resume", "--minutes", "2.5"]
    spec = spec_from(_parser().parse_args([*LEAST, *given]))
    assert spec.feature_layers == (1, 3)
    assert spec.compile is False
    assert spec.resume
    assert spec.minutes == 2.5


def test_a_wrong_flag_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *LEAST]) == 2
    assert "--minutes: give --minutes or --steps" in capfd.readouterr().err


def test_a_run_by_the_engines_own_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_target(tmp_path / "target")
    np.save(tmp_path / "text.npy", np.random.default_rng(0).integers(1, 40, size=600))
    output = tmp_path / "draft"
    arguments = ["train", "--algorithm", "EAGLE3", "--model", str(target), "--data"]
    arguments += [str(tmp_path / "text.npy"), "--output", str(output), "--device", "cpu"]
    arguments += ["--sequence-length", "24", "--on-policy-rows", "8", "--on-policy-tokens", "10"]
    arguments += ["--selection-rows", "4", "--batch-size", "4", "--no-measure", "--steps", "3"]
    assert main(arguments) == 0, capfd.readouterr().err
    with np.load(output / "own_rows.npz") as rows:
        assert rows["ids"].shape == rows["own"].shape == (8, 24)
    config = json.loads((output / "config.json").read_text())
    assert config["outrider"] == {
        "steps": 5,
        "topk": 1,
        "num_draft_tokens": 6,
        "trained_length": 24,
    }
    assert "projected accept length" in capfd.readouterr().err
    monkeypatch.setattr(train_engine, "measure_draft", lambda *_: "no room for it")
    assert main([*arguments[:-3], "--steps", "4", "--resume"]) == 1
    assert "not measured: no room for it" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_run(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = write_target(tmp_path / "target")
    np.save(tmp_path / "text.npy", np.random.default_rng(0).integers(1, 40, size=600))
    output = tmp_path / "draft"
    arguments = ["train", "--algorithm", "EAGLE3", "--model", str(target), "--data"]
    arguments += [str(tmp_path / "text.npy"), "--output", str(output), "--device", "cpu"]
    arguments += ["--sequence-length", "24", "--batch-size", "4", "--log-every", "2"]
    log = output / "log.jsonl"

    def interrupt() -> None:
        while not (log.is_file() and log.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(number)
    assert main([*arguments, "--steps", "1000000"]) == 130
    thread.join()
    assert signal.getsignal(number) is before
    said = capfd.readouterr().err
    assert "stopping after this step" in said
    assert "go on with --resume" in said
    assert "Traceback" not in said
    steps = torch.load(output / "training.pt", weights_only=True)["step"]
    assert steps >= 2
    assert (output / "model.safetensors").is_file()
    assert main([*arguments, "--steps", str(steps + 1), "--resume", "--no-measure"]) == 0
    assert torch.load(output / "training.pt", weights_only=True)["step"] == steps + 1


def test_a_second_signal_acts_at_once() -> None:
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def write_target(folder: Path) -> Path:
    """A random Qwen3 without a tokenizer."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (16, 16),
                "self_attn.k_proj": (8, 16),
                "self_attn.v_proj": (8, 16),
                "self_attn.o_proj": (16, 16),
                "self_attn.q_norm": (8,),
                "self_attn.k_norm": (8,),
                "mlp.gate_proj": (24, 16),
                "mlp.up_proj": (24, 16),
                "mlp.down_proj": (16, 24),
                "input_layernorm": (16,),
                "post_attention_layernorm": (16,),
            }.items()
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    drawn = {n: torch.randn(s, generator=generator) * 0.5 for n, s in shapes.items()}
    save_file(drawn, folder / "model.safetensors")
    return folder


def test_the_accept_length_is_measured_at_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the embedded draft: every step of a row with room is drafted, whatever it costs."""
    configs: list[EngineConfig] = []
    opened = LLM._open

    def watched(llm: LLM, config: EngineConfig) -> None:
        configs.append(config)
        opened(llm, config)

    monkeypatch.setattr(LLM, "_open", watched)
    spec = TrainSpec(
        algorithm="EAGLE3",
        model="pycoder",
        data=("d",),
        output=str(resolve_draft("EAGLE3", "pycoder", None, None)),
        device="cpu",
        steps=1,
    )
    measured = train_engine.measure_draft(spec, [[5, 6, 7, 8]], 24)
    assert isinstance(measured, train_engine.Measured)
    assert measured.tokens == 24
    assert measured.accept_length > 1.0
    assert [config.speculative_length_policy for config in configs] == ["fixed"]
