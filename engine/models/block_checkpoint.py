"""What a block draft's checkpoint holds, read and folded into what a network computes with."""

from pathlib import Path

import torch

from ...engine_core.block_tensors import CONFIDENCE, MARKOV, block_shapes, is_spare
from ...engine_core.draft_config import BlockConfig, DraftConfig
from ...engine_core.draft_names import our_name
from ..weights import Checkpoint, TensorSource, WeightsError
from .block_weights import BlockWeights, ConfidenceWeights, MarkovWeights
from .decoder_weights import read_layer
from .draft_loader import error_in, refuse_pickles
from .draft_weights import DraftTensors


def read_block_weights(folder: Path, config: DraftConfig) -> BlockWeights:
    """What the folder's checkpoint holds of a DFLASH or DSPARK draft. Raises WeightsError."""
    refuse_pickles(folder)
    checkpoint = Checkpoint(folder)
    try:
        weights = read_block(DraftTensors(checkpoint), config)
    except WeightsError as error:
        raise error_in(folder, error) from None
    checkpoint.finish(spare_names(checkpoint, config))
    return weights


def spare_names(checkpoint: Checkpoint, config: DraftConfig) -> tuple[str, ...]:
    """Tensors that a block draft's checkpoint may hold though nobody reads them."""
    return tuple(name for name in checkpoint.names if is_spare(our_name(name), config))


def read_block(source: TensorSource, config: DraftConfig) -> BlockWeights:
    """The weights of a DFLASH or DSPARK draft. Raises WeightsError naming the tensor."""
    block, model, shapes = config.block, config.model, block_shapes(config)
    assert block is not None, "block_shapes says so"

    def take(name: str) -> torch.Tensor:
        return source.take(name, shapes[name])

    weights = BlockWeights(
        fc=_joined(_fc(source, config, shapes["model.fc.weight"]), config),
        hidden_norm=take("model.hidden_norm.weight"),
        final_norm=take("model.norm.weight"),
        layers=[read_layer(source, model, index) for index in range(model.num_hidden_layers)],
    )
    _fold(weights, block, model.kv_size)
    if block.markov is not None:
        weights.markov = _read_markov(source, config)
    if block.confidence:
        try:
            weights.confidence = ConfidenceWeights(
                weight=take(f"{CONFIDENCE}proj.weight").float().reshape(-1),
                bias=take(f"{CONFIDENCE}proj.bias").float().reshape(()),
            )
        except WeightsError as error:
            raise WeightsError(
                f"{error}; a draft without a confidence head says so: write "
                "enable_confidence_head false in its config.json"
            ) from None
    return weights


def _fc(source: TensorSource, config: DraftConfig, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return source.take("model.fc.weight", shape)
    except WeightsError as error:
        count = shape[1] * len(config.feature_layers) // config.feature_size
        raise WeightsError(
            f"{error}; fc takes the outputs of {count} layers of the target, as many as "
            "target_layer_ids names: compare the two"
        ) from None


def _joined(fc: torch.Tensor, config: DraftConfig) -> torch.Tensor:
    """``fc`` [H, W] by ``feature_layers``: columns of a layer that is taken twice are summed."""
    order = config.block.fc_order if config.block is not None else ()
    layers = len(config.feature_layers)
    if order in ((), tuple(range(layers))):
        return fc
    columns = fc.view(len(fc), len(order), -1)
    if len(order) == layers:
        places = [order.index(place) for place in range(layers)]
        return columns[:, places].reshape(len(fc), -1)
    summed = torch.zeros(len(fc), layers, columns.shape[2], device=fc.device)
    summed.index_add_(1, torch.tensor(order, device=fc.device), columns.float())
    return summed.flatten(1)


def _fold(weights: BlockWeights, block: BlockConfig, kv_size: int) -> None:
    """Put Gemma's one into the norms, and the scale of values into what gives them."""
    if block.gemma_norms:
        weights.hidden_norm = weights.hidden_norm.float() + 1
        weights.final_norm = weights.final_norm.float() + 1
    for layer in weights.layers:
        if block.gemma_norms:
            layer.input_norm = layer.input_norm.float() + 1
            layer.post_norm = layer.post_norm.float() + 1
            layer.q_norm = None if layer.q_norm is None else layer.q_norm.float() + 1
            layer.k_norm = None if layer.k_norm is None else layer.k_norm.float() + 1
        if block.value_scale != 1.0:
            layer.qkv = layer.qkv.float()
            layer.qkv[-kv_size:] *= block.value_scale
            if layer.qkv_bias is not None:
                layer.qkv_bias = layer.qkv_bias.float()
                layer.qkv_bias[-kv_size:] *= block.value_scale


def _read_markov(source: TensorSource, config: DraftConfig) -> MarkovWeights:
    shapes = block_shapes(config)

    def take(name: str) -> torch.Tensor | None:
        full = f"{MARKOV}{name}"
        return source.take(full, shapes[full]) if full in shapes else None

    w1, w2 = take("markov_w1.weight"), take("markov_w2.weight")
    assert w1 is not None, "every Markov head has it"
    assert w2 is not None, "every Markov head has it"
    return MarkovWeights(
        w1=w1,
        w2=w2,
        gate=take("gate_proj.weight"),
        gate_bias=take("gate_proj.bias"),
        joint=take("joint_proj.weight"),
        joint_bias=take("joint_proj.bias"),
    )
