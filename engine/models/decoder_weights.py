"""The fused weights of a dense decoder and how they are read from a checkpoint."""

from dataclasses import dataclass, fields

import torch

from ...engine_core.model_config import ModelConfig
from ..weights import TensorSource, WeightsError

# Buffers that old checkpoints carry; the table is computed from config.json instead.
IGNORABLE = ("rotary_emb.inv_freq",)


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
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv, head = config.q_size, config.kv_size, config.head_dim

    def norm(name: str, size: int) -> torch.Tensor:
        return source.take(f"{prefix}{name}.weight", (size,))

    def matrix(names: str, outs: tuple[int, ...], width: int) -> torch.Tensor:
        parts = [
            source.take(f"{prefix}{name}.weight", (out, width))
            for name, out in zip(names.split(), outs, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias(present: bool, names: str, outs: tuple[int, ...]) -> torch.Tensor | None:
        if not present:
            return None
        parts = zip(names.split(), outs, strict=True)
        return torch.cat([source.take(f"{prefix}{name}.bias", (out,)) for name, out in parts])

    qkv_names = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
    gate_up_names = "mlp.gate_proj mlp.up_proj"
    return LayerBody(
        qkv=matrix(qkv_names, (q, kv, kv), width),
        qkv_bias=bias(config.qkv_bias, qkv_names, (q, kv, kv)),
        q_norm=norm("self_attn.q_norm", head) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head) if config.qk_norm else None,
        o=matrix("self_attn.o_proj", (hidden,), q),
        o_bias=bias(config.o_bias, "self_attn.o_proj", (hidden,)),
        post_norm=norm("post_attention_layernorm", hidden),
        gate_up=matrix(gate_up_names, (inner, inner), hidden),
        gate_up_bias=bias(config.mlp_bias, gate_up_names, (inner, inner)),
        down=matrix("mlp.down_proj", (hidden,), inner),
        down_bias=bias(config.mlp_bias, "mlp.down_proj", (hidden,)),
    )
