"""A block draft's config.json: exporters' formats, the rules of layers, masks and tokens."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from outrider.engine_core.block_capture import spread_layers
from outrider.engine_core.draft_config import BlockConfig, DraftConfig, MarkovConfig, SpecShape
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import ModelConfig, ModelConfigError
from outrider.engine_core.rope_config import RopeConfig

Fields = dict[str, Any]
Algorithm = Literal["DFLASH", "DSPARK"]

LAYER: Fields = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
DFLASH: Fields = {
    **LAYER,
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "dflash_config": {"mask_token_id": 99, "target_layer_ids": [1, 5, 9]},
    "num_target_layers": 12,
}
DSPARK: Fields = {
    **LAYER,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": 98,
    "target_layer_ids": [1, 5, 9],
    "markov_rank": 4,
    "markov_head_type": "gated",
}
BUNDLED: Fields = {
    **LAYER,
    "architectures": ["DSparkDraftModel"],
    "dspark_block_size": 5,
    "dspark_markov_rank": 4,
    "dspark_noise_token_id": 97,
    "dspark_target_layer_ids": [2, 4],
}


def speculators(kind: str, size: int, **fields: Any) -> Fields:
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": kind,
        "transformer_layer_config": {**LAYER, "model_type": "qwen3"},
        "draft_vocab_size": 100,
        "block_size": size,
        "mask_token_id": 96,
        "aux_hidden_state_layer_ids": [2, 6, 12],
        "speculators_config": {
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": size - 1}],
        },
        **fields,
    }


SPEC_DFLASH = speculators("dflash", 8, sample_from_anchor=False)
SPEC_DSPARK = speculators("dspark", 8, markov_rank=4, markov_head_type="rnn")
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
    qk_norm=True,
    tie_word_embeddings=False,
    sliding_windows=(0,) * 12,
    context_length=512,
    eos_token_ids=(0,),
    bos_token_id=None,
    torch_dtype="float32",
)


def read(
    folder: Path,
    algorithm: Algorithm,
    base: Fields,
    target: ModelConfig = TARGET,
    tokenizer: Path | None = None,
    **fields: Any,
) -> DraftConfig:
    """``base`` with ``fields``; ``...`` leaves one out, ``dflash_config`` is added to."""
    nested = fields.get("dflash_config")
    if isinstance(nested, dict):
        fields["dflash_config"] = {**base.get("dflash_config", {}), **nested}
        fields["dflash_config"] = {k: v for k, v in fields["dflash_config"].items() if v != ...}
    said = {name: value for name, value in {**base, **fields}.items() if value != ...}
    (folder / "config.json").write_text(json.dumps(said))
    return load_draft_config(folder, target, algorithm, tokenizer)


def block(folder: Path, algorithm: Algorithm, base: Fields, **fields: Any) -> BlockConfig:
    found = read(folder, algorithm, base, **fields).block
    assert found is not None
    return found


def test_a_dflash_draft_of_z_lab(tmp_path: Path) -> None:
    config = read(tmp_path, "DFLASH", DFLASH)
    assert (config.feature_layers, config.feature_size) == ((2, 6, 10), 3 * 64)
    assert (config.model.qk_norm, config.model.head_dim) == (True, 16)
    assert config.model.context_length == 512  # the target's, whatever config.json says
    assert config.defaults == SpecShape(7, 1, 8)
    assert not config.notes
    assert config.block == BlockConfig(
        drafts=7, first_row=1, mask_token_id=99, causal=(False,) * 3, fc_order=(0, 1, 2)
    )
    assert config.block.rows == 8


def test_a_dspark_draft_with_its_keys_on_top_nested_or_prefixed(tmp_path: Path) -> None:
    config = read(tmp_path, "DSPARK", DSPARK)
    expected = BlockConfig(
        drafts=7,
        first_row=0,
        mask_token_id=98,
        causal=(False,) * 3,
        markov=MarkovConfig("gated", 4),
        confidence=True,
        confidence_with_markov=True,
        fc_order=(0, 1, 2),
    )
    assert config.block == expected
    assert (expected.rows, config.defaults) == (7, SpecShape(7, 1, 8))
    keys = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    nested = {**dict.fromkeys(keys, ...), "dflash_config": {k: DSPARK[k] for k in keys}}
    assert block(tmp_path, "DSPARK", DSPARK, **nested) == expected
    later: Fields = {
        "dflash_config": {"target_layer_ids": [3]},
        "dspark_config": {"target_layer_ids": [7]},
    }
    assert read(tmp_path, "DSPARK", DSPARK, **later).feature_layers == (8,)
    prefixed = block(tmp_path, "DSPARK", BUNDLED)
    assert (prefixed.drafts, prefixed.mask_token_id) == (5, 97)
    assert prefixed.markov == MarkovConfig("vanilla", 4)  # the default of prefixed keys alone
    inner = {"text_config": LAYER, **dict.fromkeys(LAYER, ...)}
    assert block(tmp_path, "DSPARK", DSPARK, **inner) == expected


def test_a_dspark_draft_that_says_it_has_no_confidence_head(tmp_path: Path) -> None:
    off: Fields = {"enable_confidence_head": False}
    for fields in (off, {"dflash_config": off}, {"dspark_enable_confidence_head": False}):
        without = block(tmp_path, "DSPARK", DSPARK, confidence_head_with_markov=True, **fields)
        assert (without.confidence, without.confidence_with_markov) == (False, False)
        assert without.markov is not None
    assert block(tmp_path, "DSPARK", DSPARK, enable_confidence_head=True).confidence
    with pytest.raises(ModelConfigError, match="enable_confidence_head: False contradicts dflash"):
        read(tmp_path, "DSPARK", DSPARK, **off, dflash_config={"enable_confidence_head": True})


def test_speculators(tmp_path: Path) -> None:
    config = read(tmp_path, "DFLASH", SPEC_DFLASH)
    assert config.feature_layers == (2, 6, 12)  # streams by the layer that they enter
    assert config.block is not None
    assert (config.block.drafts, config.block.first_row) == (7, 1)
    assert config.block.whole_block_window
    dspark = read(tmp_path, "DSPARK", SPEC_DSPARK, sample_from_anchor=True)
    assert dspark.block is not None
    assert (dspark.block.drafts, dspark.block.first_row, dspark.block.rows) == (8, 0, 8)
    # Its block counts the anchor, which the serving convention does not.
    filled = read(tmp_path, "DSPARK", SPEC_DSPARK, sample_from_anchor=False)
    assert filled.block is not None
    assert (filled.block.drafts, filled.block.first_row, filled.block.rows) == (7, 1, 8)
    assert "8 counts the anchor" in filled.notes[0]
    served = block(tmp_path, "DSPARK", DSPARK, sample_from_anchor=False)
    assert (served.drafts, served.first_row, served.rows) == (7, 1, 8)
    # Older exports leave the field out: what they propose says it.
    assert block(tmp_path, "DSPARK", SPEC_DSPARK).first_row == 1
    every = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}]}
    assert block(tmp_path, "DSPARK", SPEC_DSPARK, speculators_config=every).first_row == 0


@pytest.mark.parametrize(
    ("layers", "drafts", "ids"),
    [
        (28, 5, (1, 7, 13, 19, 25)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 6, (1, 7, 14, 20, 27, 33)),  # halves go to the even neighbour
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
        (24, 3, (1, 11, 21)),
        (4, 2, (1, 1)),
        (12, 1, (6,)),
    ],
)
def test_the_rule_of_captured_layers(layers: int, drafts: int, ids: tuple[int, ...]) -> None:
    assert spread_layers(layers, drafts) == ids


def test_captured_layers_ascend_whatever_the_order_of_fc(tmp_path: Path) -> None:
    def capture(ids: object, **fields: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        config = read(tmp_path, "DFLASH", DFLASH, dflash_config={"target_layer_ids": ids}, **fields)
        assert config.block is not None
        return config.feature_layers, config.block.fc_order, config.feature_size

    assert capture([9, 1, 5]) == ((2, 6, 10), (2, 0, 1), 3 * 64)
    assert capture([11, 0, 11, 0, 3]) == ((1, 4, 12), (2, 0, 2, 0, 1), 3 * 64)
    assert capture([1, 2, 3, 4, 5])[1] == (0, 1, 2, 3, 4)  # more than the draft has layers
    assert capture(...)[0] == (2, 6, 10)  # the rule: 1, 5, 9
    assert capture(..., target_layer_ids=[4])[0] == (5,)
    small = msgspec.structs.replace(TARGET, num_hidden_layers=4)
    config = read(
        tmp_path,
        "DFLASH",
        DFLASH,
        small,
        num_hidden_layers=2,
        dflash_config={"target_layer_ids": ...},
    )
    assert config.block is not None
    assert (config.feature_layers, config.block.fc_order) == ((2,), (0, 0))
    assert "trained for a target of 12 layers, this one has 4" in config.notes[0]


def test_what_a_block_sees(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]

    def sight(**fields: Any) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        config = read(tmp_path, "DFLASH", DFLASH, layer_types=types, sliding_window=32, **fields)
        assert config.block is not None
        return config.model.sliding_windows, config.block.causal

    assert sight() == ((32, 0, 32), (True, False, True))
    assert sight(is_causal=False)[1] == (False, False, False)
    assert sight(is_causal=True)[1] == (True, True, True)
    assert sight(use_sliding_window=False)[0] == (32, 0, 32)
    ahead = {
        **SPEC_DFLASH,
        "transformer_layer_config": {**LAYER, "layer_types": types, "sliding_window": 16},
    }
    assert block(tmp_path, "DFLASH", ahead).causal == (True, False, True)
    assert block(tmp_path, "DFLASH", ahead, sliding_window_non_causal=True).causal == (False,) * 3


def test_defaults_and_what_reading_the_weights_minds(tmp_path: Path) -> None:
    bare = read(
        tmp_path,
        "DFLASH",
        DFLASH,
        block_size=...,
        num_key_value_heads=...,
        head_dim=...,
        max_position_embeddings=...,
        vocab_size=...,
    )
    assert bare.block is not None
    assert (bare.block.drafts, bare.defaults) == (15, None)
    assert (bare.model.num_key_value_heads, bare.model.head_dim) == (8, 8)
    assert "config.json has none; 15 tokens" in bare.notes[0]
    assert block(tmp_path, "DSPARK", DSPARK, block_size=...).drafts == 7
    scaled = block(
        tmp_path,
        "DFLASH",
        DFLASH,
        use_gemma_norm=True,
        dflash_config={
            "attention_value_scale": 2,
            "input_embedding_scale": 8.5,
            "final_logit_softcapping": -1.0,
            "output_multiplier": 1.0,
            "attention_sink_bias": False,
            "block_size": 4,  # nested first
        },
    )
    assert (scaled.gemma_norms, scaled.value_scale, scaled.embed_scale) == (True, 2.0, 8.5)
    assert scaled.drafts == 3
    bias = read(tmp_path, "DFLASH", DFLASH, attention_bias=True).model
    assert (bias.qkv_bias, bias.o_bias, bias.mlp_bias) == (True, True, False)
    rope = {
        "rope_type": "default",
        "rope_dim": 16,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1],
    }
    assert read(tmp_path, "DFLASH", DFLASH, rope_scaling=rope).model.rope == RopeConfig(
        theta=10000.0
    )
    alias = read(tmp_path, "DFLASH", DFLASH, architectures=["MuseGlimmerAssistantModel"])
    assert alias.block is not None
    # A count that a target's config.json passes on says nothing of the draft's layers.
    assert read(tmp_path, "DSPARK", DSPARK, num_nextn_predict_layers=9).model.num_hidden_layers == 3
    shape = {"steps": 7, "topk": 1, "num_draft_tokens": 8}
    assert read(tmp_path, "DFLASH", DFLASH, outrider=shape).defaults == SpecShape(7, 1, 8)


REFUSED: list[tuple[Algorithm, Fields, Fields, str]] = [
    ("DFLASH", DFLASH, {"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna.* gated attention"),
    ("DFLASH", DFLASH, {"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel has a convol"),
    ("DFLASH", DFLASH, {"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr.* lattice"),
    ("DSPARK", DSPARK, {"architectures": ["DeepseekV4ForCausalLMDSpark"]}, "latent attention and"),
    ("DSPARK", DSPARK, {"architectures": ["DSparkMiniMaxDraftModel"]}, "MiniMax.* cannot be run"),
    ("DSPARK", DFLASH, {}, r"architectures: .* no DSPARK draft.*--speculative-algorithm DFLASH"),
    ("DFLASH", DSPARK, {}, r"architectures: .* no DFLASH draft.*--speculative-algorithm DSPARK"),
    ("DFLASH", DFLASH, {"architectures": ...}, r"architectures: \[\] is no DFLASH draft"),
    ("DSPARK", SPEC_DFLASH, {}, "speculators_model_type: 'dflash' is no DSPARK.*algorithm DFLASH"),
    ("DFLASH", SPEC_DFLASH, {"speculators_model_type": "xpress"}, "'xpress' is no DFLASH draft"),
    (
        "DFLASH",
        DFLASH,
        {"dflash_config": {"projector_type": "domino"}},
        "projector_type: 'domino', Dom",
    ),
    ("DFLASH", SPEC_DFLASH, {"shift_label": True}, "shift_label: true, Domino's"),
    ("DFLASH", DFLASH, {"dflash_config": {"conv_kernel_size": 2}}, "conv_kernel_size: 2, of DFl"),
    ("DFLASH", DFLASH, {"dflash_config": {"selector_rank": 256}}, "selector_rank: 256, of DFlash2"),
    ("DFLASH", DFLASH, {"dflash_config": {"output_multiplier": 0}}, "output_multiplier: 0, of"),
    (
        "DFLASH",
        DFLASH,
        {"dflash_config": {"final_logit_softcapping": 30}},
        "final_logit_softcapping: 30, c",
    ),
    ("DFLASH", DFLASH, {"has_embed_tokens": True}, "has_embed_tokens: .*Nemotron"),
    (
        "DFLASH",
        DFLASH,
        {"dflash_config": {"attention_sink_bias": True}},
        "attention_sink_bias: true",
    ),
    (
        "DFLASH",
        DFLASH,
        {"dflash_config": {"attention_sink_bias": 1}},
        "attention_sink_bias: Expect",
    ),
    (
        "DFLASH",
        DFLASH,
        {"dflash_config": {"attention_value_scale": True}},
        "dflash_config.attention_value_scale: Expected `float`, got `bool`",
    ),
    ("DFLASH", DFLASH, {"dflash_config": {"input_embedding_scale": 0}}, "embedding_scale: must be"),
    ("DFLASH", DFLASH, {"dflash_config": 3}, "dflash_config: Expected `object`, got `int`, is 3"),
    ("DFLASH", DFLASH, {"hidden_act": "swigluoai"}, "hidden_act: 'swigluoai' is not supported"),
    ("DFLASH", DFLASH, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not"),
    ("DFLASH", DFLASH, {"rope_scaling": {"rope_dim": 8}}, "rope_scaling.rope_dim: 8, .* a part"),
    ("DFLASH", DFLASH, {"rope_is_neox_style": False}, "rope_is_neox_style: false"),
    ("DFLASH", DFLASH, {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type: 'yarn'"),
    ("DFLASH", DFLASH, {"quantization_config": {"bits": 4}}, "quantization_config: quantized"),
    ("DFLASH", SPEC_DFLASH, {"quantization_config": {"bits": 4}}, "quantization_config: quantized"),
    ("DSPARK", DSPARK, {"kv_lora_rank": 512}, "kv_lora_rank: 512, multi-head latent"),
    (
        "DSPARK",
        BUNDLED,
        {"dspark_n_routed_experts": 64},
        "dspark_n_routed_experts: 64, experts, cannot",
    ),
    ("DFLASH", DFLASH, {"dflash_config": {"target_layer_ids": []}}, "target_layer_ids: is empty"),
    ("DFLASH", DFLASH, {"dflash_config": {"target_layer_ids": 3}}, "target_layer_ids: Expected"),
    ("DFLASH", DFLASH, {"dflash_config": {"target_layer_ids": [1, 12]}}, "layer_ids: 12 is none"),
    ("DFLASH", DFLASH, {"dflash_config": {"target_layer_ids": [-1]}}, "target_layer_ids: -1 is"),
    (
        "DFLASH",
        SPEC_DFLASH,
        {"aux_hidden_state_layer_ids": [13]},
        "layer_ids: 13 is none of the 13",
    ),
    ("DFLASH", SPEC_DFLASH, {"aux_hidden_state_layer_ids": ...}, "layer_ids: missing"),
    ("DFLASH", DFLASH, {"dflash_config": {"mask_token_id": True}}, "Expected `int`, got `bool`"),
    ("DFLASH", DFLASH, {"dflash_config": {"mask_token_id": 100}}, "mask_token_id: 100 is outside"),
    ("DFLASH", DFLASH, {"dflash_config": {"mask_token_id": -1}}, "mask_token_id: -1 is outside"),
    ("DFLASH", DFLASH, {"dflash_config": {"mask_token_id": ...}}, "missing, and .* write the id"),
    ("DSPARK", DSPARK, {"mask_token_id": ...}, "mask_token_id: missing; write the id"),
    ("DSPARK", DSPARK, {"mask_token_id": 100}, "mask_token_id: 100 is outside"),
    ("DFLASH", SPEC_DFLASH, {"mask_token_id": ...}, "mask_token_id: missing; write the id"),
    ("DFLASH", DFLASH, {"layer_types": ["full_attention"]}, "layer_types: has 1 entries for 3"),
    ("DFLASH", DFLASH, {"layer_types": "full_attention"}, "layer_types: Expected"),
    ("DFLASH", DFLASH, {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' cannot"),
    ("DFLASH", DFLASH, {"layer_types": ["sliding_attention"] * 3}, "sliding_window: must be 1 or"),
    ("DFLASH", DFLASH, {"use_sliding_window": True, "sliding_window": 8}, "layer_types: missing"),
    ("DFLASH", DFLASH, {"block_size": 0}, "block_size: must be 1 or more, is 0"),
    (
        "DFLASH",
        DFLASH,
        {"block_size": 1},
        "block_size: 1 makes 0 drafts, of which a row has 1 to 63",
    ),
    ("DFLASH", DFLASH, {"block_size": 65}, "block_size: 65 makes 64 drafts"),
    ("DFLASH", SPEC_DFLASH, {"block_size": ...}, "block_size: missing"),
    ("DFLASH", SPEC_DFLASH, {"sample_from_anchor": True}, "sample_from_anchor: true, rows that"),
    ("DFLASH", SPEC_DFLASH, {"draft_vocab_size": 40}, "draft_vocab_size: 40 of the target's 100"),
    ("DFLASH", DFLASH, {"hidden_size": 32}, "hidden_size: 32 is not the target's 64"),
    ("DFLASH", DFLASH, {"vocab_size": 101}, "vocab_size: 101 is not the target's 100"),
    (
        "DFLASH",
        DFLASH,
        {"head_dim": ..., "num_attention_heads": 7},
        "head_dim: missing, and hidden",
    ),
    ("DFLASH", DFLASH, {"hidden_size": ...}, "hidden_size: missing; write it"),
    (
        "DFLASH",
        DFLASH,
        {"hidden_size": "wide"},
        'hidden_size: Expected `int`, got `str`, is "wide"',
    ),
    (
        "DFLASH",
        DFLASH,
        {"num_key_value_heads": 3},
        "num_key_value_heads: 3 does not divide .*; cor",
    ),
    ("DFLASH", DFLASH, {"head_dim": 15}, "head_dim: .* an even number, is 15; correct"),
    ("DFLASH", DFLASH, {"rms_norm_eps": 2}, "rms_norm_eps: must be between 0 and 1, is 2.*; cor"),
    ("DFLASH", DFLASH, {"eos_token_id": 100}, "eos_token_id: 100 is outside .*; correct"),
    ("DFLASH", DFLASH, {"rope_theta": -1.0}, "rope_theta: must be positive, is -1.0; correct"),
    ("DFLASH", DFLASH, {"rope_scaling": 4}, "rope_scaling: Expected `object`, got `int`, is 4"),
    (
        "DFLASH",
        DFLASH,
        {"rope_scaling": {"rope_type": "linear"}},
        "rope_scaling.factor: missing; write the positive",
    ),
    (
        "DFLASH",
        DFLASH,
        {"dflash_config": {"target_layer_ids": [1, "2"]}},
        r"dflash_config.target_layer_ids\[1\]: Expected `int`, got `str`.*\[1,",
    ),
    (
        "DFLASH",
        SPEC_DFLASH,
        {"transformer_layer_config": ...},
        "transformer_layer_config: missing beside speculators_model_type; write",
    ),
    (
        "DFLASH",
        DFLASH,
        {"outrider": {"steps": 3, "topk": 1}},
        "outrider.num_draft_tokens: missing; write it",
    ),
    ("DFLASH", DFLASH, {"intermediate_size": 0}, "intermediate_size: must be at least 1"),
    ("DSPARK", DSPARK, {"markov_rank": 0}, "markov_rank: must be 1 or more, is 0"),
    ("DSPARK", DSPARK, {"markov_rank": ...}, "markov_rank: missing"),
    ("DSPARK", DSPARK, {"markov_head_type": ...}, "markov_head_type: missing"),
    ("DSPARK", DSPARK, {"markov_head_type": "lstm"}, "markov_head_type: 'lstm' is unknown"),
    (
        "DSPARK",
        DSPARK,
        {"dflash_config": {"markov_rank": 8}},
        "markov_rank: 4 contradicts dflash_config.markov_rank 8",
    ),
    (
        "DFLASH",
        DFLASH,
        {"outrider": {"steps": 3, "topk": 1, "num_draft_tokens": 4}},
        "outrider: 3 steps of topk 1 and 4 .* its block is 7 steps",
    ),
]


@pytest.mark.parametrize(("algorithm", "base", "fields", "message"), REFUSED)
def test_refused(
    tmp_path: Path, algorithm: Algorithm, base: Fields, fields: Fields, message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message) as caught:
        read(tmp_path, algorithm, base, **fields)
    assert str(tmp_path / "config.json") in str(caught.value)
    reason = str(caught.value).removeprefix(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in reason
    field, _, wrong = reason.partition(": ")
    what, _, remedy = wrong.partition("; ")
    assert re.fullmatch(r"[\w.\[\]]+", field)
    assert len(what) > 5
    assert len(remedy) > 5


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 6')
    with pytest.raises(ModelConfigError, match=r"config.json: .*truncated.*; correct it"):
        load_draft_config(tmp_path, TARGET, "DFLASH")


def test_no_rule_for_a_target_of_three_layers(tmp_path: Path) -> None:
    small = msgspec.structs.replace(TARGET, num_hidden_layers=3)
    with pytest.raises(ModelConfigError, match="target_layer_ids: missing, and there is no rule"):
        read(tmp_path, "DFLASH", DFLASH, small, dflash_config={"target_layer_ids": ...})


def test_an_embedding_of_the_mask_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").write_bytes(b"x")
    with pytest.raises(ModelConfigError, match=r"mask_embedding.pt: .* is a pickle"):
        read(tmp_path, "DFLASH", DFLASH)


def tokenizer(folder: Path, added: Fields, mask: object = None) -> Path:
    """A tokenizer of 60 learned tokens and ``added``."""
    folder.mkdir(exist_ok=True)
    learned = {f"t{i}": i for i in range(60)}
    rest = [{"id": token, "content": text} for text, token in added.items()]
    text = json.dumps({"model": {"vocab": learned, "merges": []}, "added_tokens": rest})
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": mask}))
    return folder


def test_a_mask_token_by_name(tmp_path: Path) -> None:
    unnamed: Fields = {"dflash_config": {"mask_token_id": ...}}

    def found(folder: Path, **fields: Any) -> int:
        given = {**unnamed, **fields}
        config = read(tmp_path, "DFLASH", DFLASH, tokenizer=folder, **given)
        assert config.block is not None
        return config.block.mask_token_id

    known = tokenizer(tmp_path / "known", {"<|MASK|>": 70, "<end>": 80})
    assert found(known) == 70
    assert found(known, mask_token="t3") == 3
    assert found(known, mask_token="<new>") == 81  # as the tokenizer would number it
    assert found(tokenizer(tmp_path / "none", {})) == 60
    assert found(tokenizer(tmp_path / "low", {"<low>": 5})) == 60
    with pytest.raises(ModelConfigError, match="mask_token: '<new>' would be token 100, outside"):
        found(tokenizer(tmp_path / "full", {"<end>": 99}), mask_token="<new>")
    with pytest.raises(ModelConfigError, match="mask_token: must not be empty"):
        found(known, mask_token="")
    with pytest.raises(ModelConfigError, match=r"cannot be looked up in .*; write the id"):
        found(tmp_path / "missing")


def test_an_id_is_held_against_the_tokenizers_mask_token(tmp_path: Path) -> None:
    own = tokenizer(tmp_path / "own", {"[MASK]": 99}, "[MASK]")
    assert block(tmp_path, "DFLASH", DFLASH, tokenizer=own).mask_token_id == 99
    other = tokenizer(tmp_path / "other", {"[MASK]": 70}, {"content": "[MASK]", "lstrip": False})
    with pytest.raises(ModelConfigError, match=r"mask_token_id: 99, but .* '\[MASK\]' = 70"):
        read(tmp_path, "DFLASH", DFLASH, tokenizer=other)
    absent = tmp_path / "absent"
    assert block(tmp_path, "DFLASH", DFLASH, tokenizer=absent).mask_token_id == 99
