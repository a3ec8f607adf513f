"""A draft's config.json: what each trainer's fields mean, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.engine_core.draft_config import DraftAlgorithm, DraftConfig, SpecShape
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import ModelConfig, ModelConfigError
from outrider.engine_core.rope_config import RopeConfig

LAYER: dict[str, object] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EAGLE: dict[str, object] = {**LAYER, "architectures": ["LlamaForCausalLM"]}
EAGLE3: dict[str, object] = {
    **LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 40,
}
SPECULATORS: dict[str, object] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 40,
    "norm_before_residual": True,
    "transformer_layer_config": {**LAYER, "model_type": "llama"},
    "speculators_config": {
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "other", "speculative_tokens": 9},
            {"proposal_type": "greedy", "speculative_tokens": 4},
        ],
    },
}
TARGET = ModelConfig(
    architecture="qwen3",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    head_dim=8,
    rope=RopeConfig(theta=10000.0),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=False,
    sliding_windows=(0,) * 12,
    context_length=512,
    eos_token_ids=(0,),
    bos_token_id=None,
    torch_dtype="float32",
)


def read(
    folder: Path, algorithm: DraftAlgorithm, base: dict[str, object], **fields: object
) -> DraftConfig:
    """Write config.json (`...` drops a field) and read it."""
    kept = {name: value for name, value in {**base, **fields}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return load_draft_config(folder, TARGET, algorithm)


def test_eagle(tmp_path: Path) -> None:
    config = read(tmp_path, "EAGLE", EAGLE)
    assert (config.algorithm, config.feature_layers, config.feature_size) == ("EAGLE", (), 64)
    assert (config.draft_vocab_size, config.owns_embedding, config.owns_head) == (100, False, False)
    assert (config.fc_bias, config.first_layer_norm, config.hot_tokens) == (True, False, False)
    assert config.defaults is None
    assert not read(tmp_path, "EAGLE", EAGLE, bias=False).fc_bias
    hot = read(tmp_path, "EAGLE", EAGLE, hot_vocab_size=30)
    assert (hot.draft_vocab_size, hot.hot_tokens) == (30, True)
    qwen2 = read(tmp_path, "EAGLE", EAGLE, architectures=["Qwen2ForCausalLMEagle"])
    assert qwen2.model.qkv_bias


def test_eagle3(tmp_path: Path) -> None:
    config = read(tmp_path, "EAGLE3", EAGLE3)
    assert (config.feature_layers, config.feature_size) == ((2, 6, 9), 192)
    assert (config.draft_vocab_size, config.owns_embedding, config.owns_head) == (40, False, True)
    assert (config.fc_bias, config.norm_output, config.norm_before_residual) == (False,) * 3
    assert (config.norm_before_fc, config.chunk_norms) == (False, False)
    shared = read(tmp_path, "EAGLE3", EAGLE3, draft_vocab_size=None, norm_output=True)
    assert (shared.draft_vocab_size, shared.owns_head, shared.norm_output) == (100, False, True)
    narrow = read(tmp_path, "EAGLE3", EAGLE3, hidden_size=32, target_hidden_size=64)
    assert (narrow.owns_embedding, narrow.feature_size, narrow.model.hidden_size) == (True, 192, 32)
    llama4 = {"model_type": "llama4_text", "intermediate_size_mlp": 200}
    assert read(tmp_path, "EAGLE3", EAGLE3, **llama4).model.intermediate_size == 200
    assert read(tmp_path, "EAGLE3", EAGLE3, qkv_bias=True).model.qkv_bias
    old = read(tmp_path, "EAGLE3", EAGLE3, use_aux_norm=True, bias=True)
    assert old.chunk_norms
    assert old.fc_bias


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        # SGLang's ids name layers whose outputs are taken.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 10]}}, (2, 6, 11)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 11]}}, (0, 12)),
        # Those of speculators and vLLM name layers whose inputs are taken.
        ({"eagle_aux_hidden_state_layer_ids": [2, 6, 12]}, (2, 6, 12)),
        ({"num_aux_hidden_states": 3}, (2, 6, 9)),
        ({"eagle_config": None}, (2, 6, 9)),
    ],
)
def test_captured_layers(tmp_path: Path, fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    config = read(tmp_path, "EAGLE3", EAGLE3, **fields)
    assert config.feature_layers == layers
    assert config.feature_size == 64 * len(layers)


def test_the_final_hidden_state_as_feature(tmp_path: Path) -> None:
    final = {"use_aux_hidden_state": False, "norm_before_fc": True}
    config = read(tmp_path, "EAGLE3", EAGLE3, eagle_config=final)
    assert (config.feature_layers, config.feature_size) == ((), 64)
    assert not config.has_fc
    assert not config.norm_before_fc  # it would be in front of fc
    narrow = read(
        tmp_path, "EAGLE3", EAGLE3, eagle_config=final, hidden_size=32, target_hidden_size=64
    )
    assert narrow.has_fc
    assert narrow.norm_before_fc


def test_speculators(tmp_path: Path) -> None:
    config = read(tmp_path, "EAGLE3", SPECULATORS)
    assert config.norm_before_residual
    assert config.defaults == SpecShape(4, 1, 5)
    assert config.feature_layers == (2, 6, 9)
    assert not config.owns_embedding
    assert read(tmp_path, "EAGLE3", SPECULATORS, embed_requires_grad=True).owns_embedding
    layer = {**LAYER, "model_type": "qwen3", "head_dim": 8}
    assert read(tmp_path, "EAGLE3", SPECULATORS, transformer_layer_config=layer).model.qk_norm
    shape = {"steps": 3, "topk": 4, "num_draft_tokens": 16}
    assert read(tmp_path, "EAGLE3", SPECULATORS, outrider=shape).defaults == SpecShape(3, 4, 16)
    eagle = read(
        tmp_path,
        "EAGLE",
        SPECULATORS,
        speculators_model_type="eagle",
        fusion_bias=True,
        layernorms=False,
    )
    assert eagle.fc_bias


def test_standalone(tmp_path: Path) -> None:
    shape = {"steps": 4, "topk": 1, "num_draft_tokens": 5}
    config = read(tmp_path, "STANDALONE", EAGLE, outrider=shape)
    assert (config.feature_size, config.feature_layers) == (0, ())
    assert config.owns_embedding
    assert config.owns_head
    assert config.defaults == SpecShape(4, 1, 5)


REFUSED: list[tuple[DraftAlgorithm, dict[str, object], dict[str, object], str]] = [
    ("EAGLE", EAGLE, {"hidden_size": 32}, "hidden_size: 32 is not the target's 64"),
    ("EAGLE", EAGLE, {"vocab_size": 99}, "vocab_size: 99 is not the target's 100.*tokenizer"),
    ("STANDALONE", EAGLE, {"vocab_size": 99}, "vocab_size: 99 is not the target's 100"),
    ("EAGLE3", EAGLE3, {"vocab_size": 99}, "vocab_size: 99 is not the target's 100"),
    ("EAGLE", EAGLE, {"hot_vocab_size": 101}, "hot_vocab_size: must be between 1 and .* is 101"),
    ("EAGLE3", EAGLE3, {"draft_vocab_size": 0}, "draft_vocab_size: must be between 1 and"),
    ("EAGLE3", EAGLE3, {"hidden_size": 32}, "hidden_size: 32 is not the target's 64"),
    ("EAGLE3", EAGLE3, {"target_hidden_size": 32}, "target_hidden_size: 32 is not"),
    (
        "EAGLE3",
        EAGLE3,
        {"hidden_size": 32, "target_hidden_size": 64, "draft_vocab_size": None},
        "draft_vocab_size: missing, but a draft 32 wide",
    ),
    (
        "EAGLE",
        EAGLE,
        {"max_position_embeddings": 511},
        "max_position_embeddings: 511 is shorter .* 512; serve with --context-length 511",
    ),
    ("STANDALONE", EAGLE, {"max_position_embeddings": 9}, "max_position_embeddings: 9 is shorter"),
    ("EAGLE", EAGLE, {"quantization_config": {"bits": 4}}, "quantization_config: quantized"),
    ("EAGLE3", SPECULATORS, {"quantization_config": {}}, "quantization_config: quantized"),
    ("STANDALONE", EAGLE, {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("EAGLE3", EAGLE3, {"kv_lora_rank": 512}, "kv_lora_rank: drafts with multi-head latent"),
    ("EAGLE", EAGLE3, {}, r"architectures: .* is no EAGLE draft.*--speculative-algorithm EAGLE3"),
    ("EAGLE3", EAGLE3, {"architectures": ["Other"]}, r"architectures: \['Other'\] is no EAGLE3"),
    ("EAGLE3", EAGLE3, {"architectures": ...}, r"architectures: \[\] is no EAGLE3"),
    ("STANDALONE", EAGLE3, {}, "architectures: 'LlamaForCausalLMEagle3' is not supported"),
    ("EAGLE3", EAGLE3, {"num_aux_hidden_states": 4}, "num_aux_hidden_states: 4, but 3"),
    (
        "EAGLE3",
        EAGLE3,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 12]}},
        r"eagle_config.eagle_aux_hidden_state_layer_ids: .*\[6, 13\] do not exist",
    ),
    (
        "EAGLE3",
        EAGLE3,
        {"eagle_aux_hidden_state_layer_ids": [6, 2]},
        r"eagle_aux_hidden_state_layer_ids: .*\[6, 2\]",
    ),
    ("EAGLE3", EAGLE3, {"eagle_aux_hidden_state_layer_ids": []}, "layer_ids: "),
    ("EAGLE3", EAGLE3, {"use_sliding_window": True}, "use_sliding_window: drafts with sliding"),
    ("EAGLE3", EAGLE3, {"norm_output": "yes"}, "norm_output"),
    ("EAGLE3", SPECULATORS, {"norm_before_residual": ...}, "norm_before_residual: missing"),
    ("EAGLE3", SPECULATORS, {"speculators_model_type": "dflash"}, "'dflash' is no EAGLE3 draft"),
    ("EAGLE", SPECULATORS, {}, "speculators_model_type: 'eagle3' is no EAGLE draft"),
    ("EAGLE3", SPECULATORS, {"transformer_layer_config": ...}, "transformer_layer_config: missing"),
    (
        "EAGLE3",
        SPECULATORS,
        {"transformer_layer_config": {**LAYER, "model_type": "gemma"}},
        "transformer_layer_config.model_type: 'gemma'",
    ),
    (
        "EAGLE",
        SPECULATORS,
        {"speculators_model_type": "eagle", "layernorms": True},
        "layernorms: drafts with norms",
    ),
    ("EAGLE3", EAGLE3, {"outrider": {"steps": 3}}, "outrider"),
    (
        "EAGLE3",
        EAGLE3,
        {"outrider": {"steps": 3, "topk": 1, "num_draft_tokens": 3}},
        r"outrider.num_draft_tokens: 3 is not steps \+ 1",
    ),
    (
        "STANDALONE",
        EAGLE,
        {"outrider": {"steps": 0, "topk": 1, "num_draft_tokens": 1}},
        "outrider.steps: must be between 1 and 63, got 0",
    ),
]


@pytest.mark.parametrize(("algorithm", "base", "fields", "message"), REFUSED)
def test_refused(
    tmp_path: Path,
    algorithm: DraftAlgorithm,
    base: dict[str, object],
    fields: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ModelConfigError, match=message) as caught:
        read(tmp_path, algorithm, base, **fields)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_context_that_is_served_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE, "max_position_embeddings": 300}))
    served = msgspec.structs.replace(TARGET, context_length=300)
    assert load_draft_config(tmp_path, served, "EAGLE").model.context_length == 300


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config.json: cannot be read"):
        load_draft_config(tmp_path, TARGET, "EAGLE3")
