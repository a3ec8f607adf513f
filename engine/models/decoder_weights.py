"""The fused weights of a dense decoder and how they are read from a checkpoint."""

from dataclasses import dataclass, fields

import torch

from ...engine_core.model_config import ModelConfig
from ...engine_core.tensor_shapes import body_shapes
from ..weights import TensorSource, WeightsError


@dataclass(slots=True)
class LayerBody:
    """One decoder layer behind its input norm; matrices [out, in] in the checkpoint's dtype."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        """Those that exist, in field order."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [value for value in values if isinstance(value, torch.Tensor)]


@dataclass(slots=True)
class LayerWeights(LayerBody):
    """One decoder layer."""

    input_norm: torch.Tensor


@dataclass(slots=True)
class HeadWeights:
    """What stands around the layers; ``lm_head`` is ``embed`` itself when tied."""

    embed: torch.Tensor
    final_norm: torch.Tensor
    lm_head: torch.Tensor


def read_head(source: TensorSource, config: ModelConfig) -> HeadWeights:
    """Embedding, final norm and output head."""
    shape = (config.vocab_size, config.hidden_size)
    embed = source.take("model.embed_tokens.weight", shape)
    final_norm = source.take("model.norm.weight", (config.hidden_size,))
    if not config.tie_word_embeddings:
        return HeadWeights(embed, final_norm, source.take("lm_head.weight", shape))
    if source.has("lm_head.weight"):
        extra = source.take("lm_head.weight", shape)
        if not torch.equal(extra, embed):
            raise WeightsError(
                "lm_head.weight: differs from model.embed_tokens.weight although config.json says "
                "tie_word_embeddings; set it to false to use the head of the checkpoint"
            )
    return HeadWeights(embed, final_norm, embed)


def read_layer(source: TensorSource, config: ModelConfig, index: int) -> LayerWeights:
    """Layer ``index`` with q/k/v and gate/up concatenated."""
    name = f"model.layers.{index}.input_layernorm.weight"
    input_norm = source.take(name, (config.hidden_size,))
    body = read_body(source, config, index, config.hidden_size)
    parts = {field.name: getattr(body, field.name) for field in fields(body)}
    return LayerWeights(**parts, input_norm=input_norm)


def read_body(source: TensorSource, config: ModelConfig, index: int, width: int) -> LayerBody:
    """Layer ``index`` without its input norm; attention takes in ``width`` elements."""
    prefix = f"model.layers.{index}."
    shapes = body_shapes(config, index, width)

    def take(name: str) -> torch.Tensor:
        return source.take(prefix + name, shapes[prefix + name])

    def norm(name: str) -> torch.Tensor | None:
        return take(f"{name}.weight") if f"{prefix}{name}.weight" in shapes else None

    def matrix(*names: str) -> torch.Tensor:
        parts = [take(f"{name}.weight") for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias(*names: str) -> torch.Tensor | None:
        if f"{prefix}{names[0]}.bias" not in shapes:
            return None
        return torch.cat([take(f"{name}.bias") for name in names])

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return LayerBody(
        qkv=matrix(*qkv),
        qkv_bias=bias(*qkv),
        q_norm=norm("self_attn.q_norm"),
        k_norm=norm("self_attn.k_norm"),
        o=matrix("self_attn.o_proj"),
        o_bias=bias("self_attn.o_proj"),
        post_norm=take("post_attention_layernorm.weight"),
        gate_up=matrix(*gate_up),
        gate_up_bias=bias(*gate_up),
        down=matrix("mlp.down_proj"),
        down_bias=bias("mlp.down_proj"),
    )
