"""What is read of a block draft's checkpoint, what is computed of it, and what is refused."""

import sys
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.models.block_checkpoint import read_block_weights
from outrider.engine.models.block_loader import load_block_draft
from outrider.engine.models.block_weights import BlockWeights
from outrider.engine.models.loader import LoadFormat, load_model
from outrider.engine.weights import WeightsError
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.device_config import Placement
from outrider.engine_core.draft_config import DraftAlgorithm, DraftConfig, SpecShape
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.draft_sizes import draft_sizes
from outrider.engine_core.draft_source import DraftSource, find_draft
from outrider.engine_core.memory_parts import rotary_bytes, slots
from outrider.engine_core.memory_plan import MemoryPlan, plan_memory
from outrider.engine_core.model_config import ModelConfigError, load_model_config
from outrider.engine_core.safetensors_header import HeaderError
from outrider.engine_core.tensor_checks import check_draft_tensors

from .block_checkpoints import BLOCKS, RANK, random_features, write_block
from .tiny import write_checkpoint

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
ON_CUDA, ON_CPU = Placement("cuda", "bfloat16", 0.9), Placement("cpu", "float32", 0.9)
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), 48, layers=4)


def config_of(
    folder: Path, target: Path, algorithm: DraftAlgorithm, confidence: bool = True
) -> DraftConfig:
    config = load_draft_config(folder, load_model_config(target), algorithm)
    assert config.block is not None
    asked = msgspec.structs.replace(config.block, confidence=config.block.confidence and confidence)
    return msgspec.structs.replace(config, block=asked)


def stored(folder: Path) -> Tensors:
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_every_exporters_checkpoint_is_read_whole(tmp_path: Path, target: Path, name: str) -> None:
    kind = BLOCKS[name]
    kind.write(tmp_path, target)
    config = config_of(tmp_path, target, kind.algorithm)
    check_draft_tensors(tmp_path, config)
    weights, raw = read_block_weights(tmp_path, config), stored(tmp_path)
    block = config.block
    assert block is not None
    assert (block.drafts, block.first_row) == (kind.drafts, kind.first_row)
    one = 1.0 if block.gemma_norms else 0.0
    hidden, width = config.model.hidden_size, config.feature_size
    assert weights.fc.shape == (hidden, width)
    assert torch.equal(weights.hidden_norm, raw["hidden_norm.weight"] + one)
    assert torch.equal(weights.final_norm, raw["norm.weight"] + one)
    assert len(weights.layers) == config.model.num_hidden_layers
    for index, layer in enumerate(weights.layers):
        at = f"layers.{index}.self_attn."
        values = raw[f"{at}v_proj.weight"] * block.value_scale
        parts = [raw[f"{at}q_proj.weight"], raw[f"{at}k_proj.weight"], values]
        assert torch.equal(layer.qkv, torch.cat(parts))
        assert layer.q_norm is not None
        assert torch.equal(layer.q_norm, raw[f"{at}q_norm.weight"] + one)
        assert (layer.qkv_bias is not None) == (name == "dflash-bias")
        assert torch.equal(layer.input_norm, raw[f"layers.{index}.input_layernorm.weight"] + one)
        post = raw[f"layers.{index}.post_attention_layernorm.weight"]
        assert torch.equal(layer.post_norm, post + one)
    assert (weights.markov is None) == (kind.algorithm == "DFLASH")
    if weights.markov is not None:
        assert weights.markov.w1.shape == weights.markov.w2.shape == (48, RANK)
        assert block.markov is not None
        assert (weights.markov.gate is not None) == (block.markov.kind == "gated")
        assert (weights.markov.joint_bias is not None) == (block.markov.kind == "rnn")
    if weights.confidence is not None:
        rank = 0 if name == "dspark-specforge" else RANK
        assert block.confidence_with_markov == bool(rank)  # by the weight's width
        assert weights.confidence.weight.shape == (hidden + rank,)
        assert weights.confidence.bias.shape == ()
        assert weights.confidence.weight.dtype == torch.float32
    assert (weights.confidence is not None) == (
        kind.algorithm == "DSPARK" and name != "dspark-no-confidence"
    )


@pytest.mark.parametrize("ids", [(0, 1, 2), (2, 0, 1), (1, 1), (3, 0, 3, 3, 1)])
def test_fc_takes_features_as_they_are_captured(
    tmp_path: Path, target: Path, ids: tuple[int, ...]
) -> None:
    write_block(tmp_path, target, layer_ids=ids)
    config = config_of(tmp_path, target, "DFLASH")
    layers, hidden = config.feature_layers, config.model.hidden_size
    assert list(layers) == sorted({i + 1 for i in ids})
    features = random_features(5, config.feature_size).view(5, len(layers), hidden)
    # What the trainer fed: the outputs of its layers, side by side in its order.
    given = torch.cat([features[:, layers.index(i + 1)] for i in ids], dim=1)
    expected = given.double() @ stored(tmp_path)["fc.weight"].double().T
    fc = read_block_weights(tmp_path, config).fc
    assert torch.allclose(features.flatten(1).double() @ fc.double().T, expected, atol=1e-5)


def test_sums_and_folds_of_bfloat16_are_not_rounded(tmp_path: Path, target: Path) -> None:
    write_block(
        tmp_path,
        target,
        layer_ids=(1, 1),
        bias=True,
        use_gemma_norm=True,
        nested={"attention_value_scale": 0.3},
    )
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    config = config_of(tmp_path, target, "DFLASH")
    weights, raw = read_block_weights(tmp_path, config), stored(tmp_path)
    halves = raw["fc.weight"].float().chunk(2, dim=1)
    assert torch.equal(weights.fc, halves[0] + halves[1])
    assert torch.equal(weights.final_norm, raw["norm.weight"].float() + 1)
    layer, size = weights.layers[0], config.model.kv_size
    values = raw["layers.0.self_attn.v_proj.weight"].float() * 0.3
    assert torch.equal(layer.qkv[-size:], values)
    assert torch.equal(
        layer.qkv[size:-size][-size:], raw["layers.0.self_attn.k_proj.weight"].float()
    )
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias[-size:], raw["layers.0.self_attn.v_proj.bias"].float() * 0.3)
    assert layer.down.dtype == torch.bfloat16


def damage(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"lacks tensor 'model\.fc\.weight' \[16, 48\]"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :32]}),
            r"'fc\.weight' has shape \[16, 32\], config.json asks for \[16, 48\]",
        ),
        (lambda t: t.pop("layers.1.self_attn.q_norm.weight"), r"lacks tensor .*layers\.1.*q_norm"),
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"lacks tensor .*layers\.1\.mlp\.up_proj"),
        (
            lambda t: t.update({"prefix_gru.weight_ih_l0": torch.zeros(3, 2)}),
            "not in the model.*gru",
        ),
        (
            lambda t: t.update({"layers.0.self_attn.attention_sink_bias": torch.zeros(4)}),
            "sink_bias",
        ),
        (lambda t: t.update({"d2t": torch.zeros(4)}), "not in the model of config.json: 'd2t'"),
        (lambda t: t.pop("markov_head.markov_w2.weight"), r"lacks tensor .*markov_w2"),
        (
            lambda t: t.pop("confidence_head.proj.bias"),
            r"lacks tensor .*confidence_head\.proj\.bias",
        ),
        (lambda t: t.update({"confidence_head.more": torch.zeros(2)}), "'confidence_head.more'"),
        (lambda t: t.update({"markov_head.gate_proj.bias": torch.zeros(6)}), "gate_proj.bias"),
        (
            lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()}),
            "are the same one",
        ),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(
    tmp_path: Path, target: Path, change: Callable[[Tensors], object], message: str
) -> None:
    write_block(tmp_path, target, "DSPARK")
    damage(tmp_path, change)
    config = config_of(tmp_path, target, "DSPARK")
    with pytest.raises(WeightsError, match=message) as caught:
        read_block_weights(tmp_path, config)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(HeaderError):
        check_draft_tensors(tmp_path, config)


def test_a_wrong_fc_says_how_many_layers_it_was_to_take(tmp_path: Path, target: Path) -> None:
    write_block(tmp_path, target, layer_ids=(2, 1, 1))
    damage(tmp_path, lambda t: t.update({"fc.weight": t["fc.weight"][:, :32]}))
    with pytest.raises(WeightsError, match=r"\[16, 48\]; fc takes the outputs of 3 layers"):
        read_block_weights(tmp_path, config_of(tmp_path, target, "DFLASH"))


def test_what_is_the_targets_or_not_asked_for_is_left(tmp_path: Path, target: Path) -> None:
    write_block(tmp_path, target, "DSPARK")
    spare = {
        "embed_tokens.weight": torch.zeros(48, 16),
        "lm_head.weight": torch.zeros(48, 16),
        "verifier_norm.weight": torch.zeros(16),
        "rotary_emb.inv_freq": torch.zeros(4),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    damage(tmp_path, lambda t: t.update(spare))
    asked = config_of(tmp_path, target, "DSPARK")
    assert read_block_weights(tmp_path, asked).confidence is not None
    check_draft_tensors(tmp_path, asked)
    plain = config_of(tmp_path, target, "DSPARK", confidence=False)
    assert read_block_weights(tmp_path, plain).confidence is None
    check_draft_tensors(tmp_path, plain)
    # A checkpoint without the head serves where nobody asks for it, and nowhere else.
    damage(tmp_path, lambda t: [t.pop(f"confidence_head.proj.{n}") for n in ("weight", "bias")])
    assert read_block_weights(tmp_path, plain).confidence is None
    with pytest.raises(
        WeightsError, match=r"lacks tensor .*confidence_head\.proj\.weight.*_head false"
    ):
        read_block_weights(tmp_path, asked)


def test_aliases_and_prefixes_of_names(tmp_path: Path, target: Path) -> None:
    write_block(tmp_path / "plain", target)
    write_block(tmp_path / "alias", target)

    def rename(tensors: Tensors) -> None:
        for ours, theirs in (
            ("fc.weight", "encoder.fc.weight"),
            ("hidden_norm.weight", "encoder.output_norm_enc.weight"),
            ("norm.weight", "model.norm.weight"),
        ):
            tensors[theirs] = tensors.pop(ours)

    damage(tmp_path / "alias", rename)
    both = [
        read_block_weights(folder, config_of(folder, target, "DFLASH"))
        for folder in (tmp_path / "plain", tmp_path / "alias")
    ]
    for name in ("fc", "hidden_norm", "final_norm"):
        assert torch.equal(getattr(both[0], name), getattr(both[1], name))


def test_a_confidence_head_that_config_json_contradicts(tmp_path: Path, target: Path) -> None:
    write_block(tmp_path, target, "DSPARK", confidence="hidden", confidence_head_with_markov=True)
    with pytest.raises(ModelConfigError, match="confidence_head_with_markov: true, but the head's"):
        config_of(tmp_path, target, "DSPARK")


def test_pickles_are_not_read(tmp_path: Path, target: Path) -> None:
    write_block(tmp_path, target)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin, which can run code"):
        read_block_weights(tmp_path, config_of(tmp_path, target, "DFLASH"))


@pytest.mark.parametrize("name", ["dflash-repeated", "dspark-rnn", "dspark-speculators-filled"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_network_is_made_of_them(
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    load_format: LoadFormat,
) -> None:
    kind = BLOCKS[name]
    kind.write(tmp_path, target)
    config = config_of(tmp_path, target, kind.algorithm)
    made: list[tuple[BlockWeights, DraftConfig, torch.dtype]] = []

    class Net:
        def __init__(
            self,
            weights: BlockWeights,
            config: DraftConfig,
            target: object,
            dtype: torch.dtype,
            *_: object,
        ) -> None:
            made.append((weights, config, dtype))

    module = types.ModuleType("torch_block")
    module.TorchBlock = Net  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outrider.engine.models.torch_block", module)
    model = load_model(target, load_model_config(target), torch.float32, CPU)
    net: object = load_block_draft(tmp_path, config, model, torch.float32, CPU, load_format)
    assert isinstance(net, Net)
    weights, longer, dtype = made[0]
    assert dtype == torch.float32
    assert longer.model.context_length > config.model.context_length
    assert weights.fc.shape == (16, config.feature_size)
    assert (weights.markov is not None) == (kind.algorithm == "DSPARK")
    assert all(bool(torch.isfinite(layer.qkv).all()) for layer in weights.layers)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("placement", [ON_CPU, ON_CUDA])
def test_weights_are_planned_exactly(
    tmp_path: Path, target: Path, name: str, placement: Placement
) -> None:
    kind = BLOCKS[name]
    kind.write(tmp_path, target)
    config = config_of(tmp_path, target, kind.algorithm)
    weights = read_block_weights(tmp_path, config)
    tensors = [weights.fc, weights.hidden_norm, weights.final_norm]
    tensors += [tensor for layer in weights.layers for tensor in layer.tensors()]
    if weights.markov is not None:
        parts = (getattr(weights.markov, field.name) for field in fields(weights.markov))
        tensors += [part for part in parts if part is not None]
    item = 4 if placement.dtype == "float32" else 2
    expected = item * sum(tensor.numel() for tensor in tensors)
    if placement.device == "cuda":  # injection's own copy of the key and value rows
        expected += item * config.model.num_hidden_layers * 2 * config.model.kv_size * 16
    if weights.confidence is not None:
        expected += 4 * (weights.confidence.weight.numel() + 1)
    shape = SpecShape(kind.drafts, 1, kind.drafts + 1)
    source = DraftSource(tmp_path, config, shape, "auto", {}, "float32", None)
    sizes = draft_sizes(source, placement)
    assert sizes.weight_bytes == expected
    model = config.model
    assert sizes.kv_bytes_per_token == 2 * model.num_hidden_layers * model.kv_size * item


def test_a_plan_of_an_8b_target_counts_its_block_draft() -> None:
    folder = CONFIGS / "qwen3-8b-dflash"
    config = EngineConfig(
        model=str(CONFIGS / "qwen3-8b"),
        load_format="dummy",
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(folder),
    )
    target = load_model_config(CONFIGS / "qwen3-8b")
    draft = find_draft(config, target)
    assert draft is not None
    free = 140 << 30
    plan = plan_memory(config.with_shape(draft.shape), target, {}, ON_CUDA, free, draft)
    assert isinstance(plan, MemoryPlan), plan
    assert plan.draft_kv_bytes_per_token == 20_480  # 5 layers of 8 heads of 128, twice, 2 bytes
    assert plan.draft_weight_bytes == 2 * (
        5 * (4096 * (2 * 4096 + 2048 + 3 * 12288) + 8448)
        + 5 * 4096**2
        + 2 * 4096
        + 5 * 2048 * 4096  # key and value rows once more, for injection
    )
    assert plan.draft_activation_bytes > 2 * 512 * 5 * 4096  # the features of a prompt's chunk
    assert plan.draft_graph_bytes > 0
    plain = plan_memory(config.without_speculation(), target, {}, ON_CUDA, free)
    assert isinstance(plain, MemoryPlan)
    rotary = rotary_bytes(draft.config.model)
    assert plan.state_bytes - plain.state_bytes == rotary + 8 * slots(config)
