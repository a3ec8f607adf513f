"""Tiny models: random Qwen3 checkpoints in a folder, and the config of a bigram table."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.engine.models import Model, load_model
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.rope_config import RopeConfig


def write_checkpoint(
    folder: Path,
    vocab_size: int,
    *,
    scale: float = 0.4,
    layers: int = 2,
    seed: int = 3,
    hidden: int = 16,
    inner: int = 24,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 8,
) -> Path:
    """A random Qwen3 of ``layers`` layers; ``scale`` spreads the logits."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 0,
    }
    generator = torch.Generator().manual_seed(seed)

    def matrix(out: int, width: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(out, width, generator=generator).mul(gain / math.sqrt(width))

    tensors = {
        "model.embed_tokens.weight": matrix(vocab_size, hidden, 4.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(vocab_size, hidden, 4.0 * scale),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        sizes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, size in sizes.items():
            tensors[f"{prefix}{name}.weight"] = matrix(*size, gain=2.0)
        for name, width in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", head_dim),
            ("self_attn.k_norm", head_dim),
        ):
            tensors[f"{prefix}{name}.weight"] = torch.ones(width)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load_tiny(folder: Path) -> tuple[Model, ModelConfig]:
    config = load_model_config(folder)
    return load_model(folder, config, torch.float32, torch.device("cpu")), config


def bigram_config(vocab_size: int) -> ModelConfig:
    """A config for a pool that a bigram model never touches."""
    return ModelConfig(
        architecture="qwen3",
        vocab_size=vocab_size,
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        rms_norm_eps=1e-6,
        head_dim=1,
        rope=RopeConfig(theta=10000.0),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        sliding_windows=(0,),
        context_length=512,
        eos_token_ids=(0,),
        bos_token_id=None,
        torch_dtype="float32",
    )
