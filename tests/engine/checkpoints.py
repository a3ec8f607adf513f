"""Tiny random checkpoints of each family, written by transformers."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _sizes(heads: int = 4, kv_heads: int = 2) -> dict[str, int]:
    return {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
    }


def build(kind: str) -> PreTrainedModel:
    """A float32 model in eval mode with weights large enough for logits to differ clearly."""
    torch.manual_seed(7)
    makers = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**_sizes(6, 2), head_dim=8)),
        "llama-mha-bias": lambda: LlamaForCausalLM(
            LlamaConfig(**_sizes(3, 3), attention_bias=True, mlp_bias=True, head_dim=16)
        ),
        "llama3-rope": lambda: LlamaForCausalLM(
            LlamaConfig(**_sizes(), head_dim=16, tie_word_embeddings=True, rope_parameters=_LLAMA3)
        ),
        "llama-linear-rope": lambda: LlamaForCausalLM(
            LlamaConfig(
                **_sizes(),
                head_dim=24,
                rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            )
        ),
        "mistral-window": lambda: MistralForCausalLM(
            MistralConfig(**_sizes(), head_dim=16, sliding_window=9)
        ),
        "mistral-odd-head": lambda: MistralForCausalLM(
            MistralConfig(**_sizes(), head_dim=12, sliding_window=None)
        ),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_sizes(6, 3), tie_word_embeddings=True)),
        "qwen2-window": lambda: Qwen2ForCausalLM(
            Qwen2Config(
                **_sizes(6, 6), use_sliding_window=True, sliding_window=11, max_window_layers=1
            )
        ),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_sizes(), head_dim=32)),
        "qwen3-tied-bias": lambda: Qwen3ForCausalLM(
            Qwen3Config(**_sizes(4, 1), head_dim=16, tie_word_embeddings=True, attention_bias=True)
        ),
    }
    model = makers[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.12)
    return model.eval()


KINDS = (
    "llama",
    "llama-mha-bias",
    "llama3-rope",
    "llama-linear-rope",
    "mistral-window",
    "mistral-odd-head",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-tied-bias",
)


def save(kind: str, folder: Path, shard_size: str = "5GB") -> PreTrainedModel:
    """Write the checkpoint into ``folder`` and return the model."""
    model = build(kind)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model
