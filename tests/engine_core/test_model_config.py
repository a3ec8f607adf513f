"""config.json: what is read, in both spellings, and what is refused with the field's name."""

import json
from pathlib import Path

import pytest

from outrider.engine_core.model_config import ModelConfig, ModelConfigError, load_model_config
from outrider.engine_core.model_path import ModelNotFound, resolve_model
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.rope_config import RopeConfig

BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3: dict[str, object] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
    "rope_type": "llama3",
}


def read(folder: Path, **fields: object) -> ModelConfig:
    """Write config.json (`...` drops a field) and read it."""
    merged = {**BASE, **fields}
    kept = {name: value for name, value in merged.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return load_model_config(folder)


def test_llama_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=...)
    assert config.num_key_value_heads == 8
    assert (config.head_dim, config.q_size, config.kv_size) == (8, 64, 64)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.sliding_windows == (0, 0, 0, 0)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)
    assert not config.qk_norm
    assert config.eos_token_ids == ()
    assert config.context_length == 4096
    assert config.torch_dtype == "float32"


def test_biases_by_family(tmp_path: Path) -> None:
    llama = read(tmp_path, attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_parameters": LLAMA3, "rope_theta": 5e5},
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, fields: dict[str, object]) -> None:
    assert read(tmp_path, **fields).rope == RopeConfig(
        theta=5e5,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=2048,
    )


def test_linear_rope_by_its_old_name(tmp_path: Path) -> None:
    rope = read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rope
    assert rope == RopeConfig(rope_type="linear", factor=2.0)


def test_sliding_windows(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(tmp_path, **mistral, sliding_window=7).sliding_windows == (7,) * 4
    assert read(tmp_path, **mistral, sliding_window=None).sliding_windows == (0,) * 4
    assert read(tmp_path, **mistral).sliding_windows == (4096,) * 4
    qwen: dict[str, object] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}
    assert read(tmp_path, **qwen, max_window_layers=2).sliding_windows == (0,) * 4
    on = {**qwen, "use_sliding_window": True}
    assert read(tmp_path, **on, max_window_layers=2).sliding_windows == (0, 0, 7, 7)
    types = ["sliding_attention", "full_attention"] * 2
    assert read(tmp_path, **on, layer_types=types).sliding_windows == (7, 0, 7, 0)


def test_eos_of_both_files(tmp_path: Path) -> None:
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [2, 5]}')
    config = read(tmp_path, eos_token_id=2, bos_token_id=1)
    assert config.eos_token_ids == (2, 5)
    assert config.bos_token_id == 1
    generation.write_text('{"eos_token_id": 9}')
    assert read(tmp_path, eos_token_id=[3, 4]).eos_token_ids == (3, 4, 9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: 'GPT2LMHeadModel' is not"),
        ({"architectures": []}, "architectures: expected"),
        ({"architectures": ...}, "architectures: expected"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: .* use the"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_size": "64"}, "hidden_size: Expected"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size: must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must"),
        ({"num_attention_heads": 0}, "head_dim: missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: must"),
        ({"hidden_size": 60}, "head_dim: missing"),
        ({"head_dim": 7}, "head_dim: rotary"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"eos_token_id": 100}, "eos_token_id: 100"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"rope_theta": -1.0}, "rope_theta: must be positive"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type: 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor: must be above"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor: 0.25"),
        ({"rope_parameters": {"full_attention": {}}}, "frequencies per layer type"),
        ({"sliding_window": 0}, "sliding_window: must"),
        ({"layer_types": ["full_attention"]}, "layer_types: has 1 entries"),
        ({"layer_types": ["mamba"] * 4}, "layer_types: 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: .* LlamaForCausalLM"),
    ],
)
def test_refused(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message) as raised:
        read(tmp_path, **fields)
    assert "config.json" in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": ...}, "num_key_value"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "layer_types: mixed",
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": None,
                "layer_types": ["sliding_attention"] * 4,
            },
            "layer_types: contradicts",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            "use_sliding_window",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 7,
                "use_sliding_window": True,
            },
            "max_window_layers: missing",
        ),
    ],
)
def test_refused_by_family(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read(tmp_path, **fields)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"a model folder needs a config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="truncated"):
        load_model_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelConfigError, match="eos_token_id"):
        read(tmp_path)


def test_resolve_model(tmp_path: Path) -> None:
    embedded = resolve_model("pycoder")
    assert load_model_config(embedded).vocab_size == 8192
    read(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve_model(str(tmp_path / "empty"))
    with pytest.raises(RefusedError, match="revision: the embedded model 'pycoder' has no"):
        resolve_model("pycoder", "main")
    with pytest.raises(RefusedError, match="revision: the folder"):
        resolve_model(str(tmp_path), "main")


def test_what_was_looked_for_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"embedded models \(pycoder\).*the folder 'nothing'"):
        resolve_model("nothing")
    with pytest.raises(ModelNotFound) as raised:
        resolve_model("nobody/nothing-here", "v9")
    text = str(raised.value)
    assert "the local Hugging Face cache (nobody/nothing-here at v9)" in text
    assert "the Hugging Face hub (nobody/nothing-here at v9)" in text
    assert "HF_HUB_OFFLINE" in text
    assert ".. " not in text, "the reason may end in a full stop of its own"
