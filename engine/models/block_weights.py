"""The weights of block drafts, DFLASH's and DSPARK's, and how they are read."""

from dataclasses import dataclass, field

import torch

from ...engine_core.block_tensors import CONFIDENCE, MARKOV, block_shapes
from ...engine_core.draft_config import BlockConfig, DraftConfig
from ..weights import TensorSource, WeightsError
from .decoder_weights import LayerWeights, read_layer


@dataclass(slots=True)
class MarkovWeights:
    """DSPARK's Markov head (block_drafts.md 2.5), of rank r over V tokens and H channels.

    ``w1``, ``w2`` [V, r]. ``gate`` [r, H + r] or ``joint`` [3r, 2r + H] with their biases, by the
    head's kind; None for the others.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    gate: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    joint: torch.Tensor | None = None
    joint_bias: torch.Tensor | None = None


@dataclass(slots=True)
class ConfidenceWeights:
    """DSPARK's confidence head, float32: ``weight`` [H] or [H + r], ``bias`` []."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(slots=True)
class BlockWeights:
    """Matrices are [out, in], in the checkpoint's dtype; in float32 where reading them computes
    something: Gemma's norms are here as 1 + w, value scales in the value rows of ``qkv``.

    ``fc`` [H, W] joins the target's features of a position, in the order of ``feature_layers``
    whatever the checkpoint's is; ``hidden_norm`` [H] is behind it. Embedding and head are the
    target's.
    """

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    final_norm: torch.Tensor
    layers: list[LayerWeights] = field(default_factory=list)
    markov: MarkovWeights | None = None
    confidence: ConfidenceWeights | None = None


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
        weights.confidence = ConfidenceWeights(
            weight=take(f"{CONFIDENCE}proj.weight").float().reshape(-1),
            bias=take(f"{CONFIDENCE}proj.bias").float().reshape(()),
        )
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
