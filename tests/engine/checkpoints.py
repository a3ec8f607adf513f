"""Tiny random checkpoints of each family, written by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}
_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "head_dim": 8},
    "llama-mha-bias": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-llama3-rope": {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": _LLAMA3},
    "llama-linear-rope": {"head_dim": 24, "rope_parameters": _LINEAR},
    "mistral-window": {"head_dim": 16, "sliding_window": 9},
    "mistral-odd-head": {"head_dim": 12, "sliding_window": None},
    "qwen2": {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "qwen2-window": {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 32},
    "qwen3-tied-bias": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
}
KINDS = tuple(_FIELDS)


def save(kind: str, folder: Path, shard_size: str = "5GB", **fields: Any) -> Any:
    """Write a checkpoint into ``folder`` and return the transformers model, in eval mode.

    ``fields`` replace those of the kind. Its weights are large enough for logits to differ clearly.
    """
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind.partition("-")[0], **{**_BASE, **_FIELDS[kind], **fields})
    automodel: Any = AutoModelForCausalLM
    model = automodel.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.12)
    model.eval()
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model
