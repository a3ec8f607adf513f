"""Tiny random drafts for a tiny target, as each trainer would write them."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


class Sizes:
    """What a draft is made of, from the config of its target."""

    def __init__(self, target: Path, seed: int, hidden: int | None = None) -> None:
        self.target: dict[str, Any] = json.loads((target / "config.json").read_text())
        self.vocab: int = self.target["vocab_size"]
        self.target_hidden: int = self.target["hidden_size"]
        self.hidden = hidden or self.target_hidden
        self.inner, self.heads, self.kv_heads, self.head_dim = self.hidden + 8, 4, 2, 8
        self._generator = torch.Generator().manual_seed(seed)

    def config(self, layers: int) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.target["max_position_embeddings"],
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": 0,
        }

    def matrix(self, out: int, width: int, gain: float = 1.5) -> torch.Tensor:
        return torch.randn(out, width, generator=self._generator).mul(gain / math.sqrt(width))

    def norm(self, size: int) -> torch.Tensor:
        return torch.rand(size, generator=self._generator) + 0.5

    def layer(self, prefix: str, width: int) -> Tensors:
        """A layer whose attention takes in ``width`` elements, without the norms before it."""
        hidden, inner, size = self.hidden, self.inner, self.head_dim
        shapes = {
            "self_attn.q_proj": (self.heads * size, width),
            "self_attn.k_proj": (self.kv_heads * size, width),
            "self_attn.v_proj": (self.kv_heads * size, width),
            "self_attn.o_proj": (hidden, self.heads * size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        tensors = {f"{prefix}{name}.weight": self.matrix(*shape) for name, shape in shapes.items()}
        tensors[f"{prefix}post_attention_layernorm.weight"] = self.norm(hidden)
        return tensors

    def draft_tokens(self, count: int) -> torch.Tensor:
        """int64[count] different ids of the target, ascending."""
        return torch.randperm(self.vocab, generator=self._generator)[:count].sort().values


def write_eagle(
    folder: Path,
    target: Path,
    *,
    layers: int = 1,
    seed: int = 5,
    bias: bool = True,
    agrees: bool = False,
    **fields: Any,
) -> Path:
    """EAGLE, as its authors write it: no ``model.`` prefix, no norm before the first layer.

    ``agrees``: the draft proposes by the token alone, which is what a target with weak layers does.
    ``fields`` are added to config.json.
    """
    sizes = Sizes(target, seed)
    hidden = sizes.hidden
    tensors = {
        "embed_tokens.weight": sizes.matrix(sizes.vocab, hidden),
        "fc.weight": sizes.matrix(hidden, 2 * hidden),
    }
    if agrees:
        tensors["fc.weight"] = torch.eye(hidden, 2 * hidden)
    if bias:
        tensors["fc.bias"] = sizes.matrix(1, hidden).flatten() * (not agrees)
    for index in range(layers):
        prefix = f"layers.{index}."
        layer = sizes.layer(prefix, hidden)
        if agrees:
            layer = {name: tensor * 0.01 for name, tensor in layer.items()}
        tensors |= layer
        if index:
            tensors[f"{prefix}input_layernorm.weight"] = sizes.norm(hidden)
    config = {"architectures": ["LlamaForCausalLM"], "bias": bias, **sizes.config(layers)}
    return write(folder, {**config, **fields}, tensors)


def write_eagle3(
    folder: Path,
    target: Path,
    *,
    layers: int = 1,
    seed: int = 6,
    draft_vocab: int | None = None,
    hidden: int | None = None,
    layer_ids: tuple[int, ...] | None = None,
    **fields: Any,
) -> Path:
    """EAGLE3, as its authors write it: ``midlayer``, a head and a vocabulary of its own.

    ``draft_vocab``: half of the target's by default; 0 shares the target's head.
    ``layer_ids``: layers whose outputs it takes, by default three that any target has.
    """
    sizes = Sizes(target, seed, hidden)
    count = sizes.target["num_hidden_layers"]
    ids = (-1, (count - 1) // 2, count - 1) if layer_ids is None else layer_ids
    size = sizes.vocab // 2 if draft_vocab is None else draft_vocab
    width = sizes.hidden
    tensors = {
        "fc.weight": sizes.matrix(width, max(len(ids), 1) * sizes.target_hidden),
        "norm.weight": sizes.norm(width),
    }
    if width != sizes.target_hidden:
        tensors["embed_tokens.weight"] = sizes.matrix(sizes.vocab, width)
    for index in range(layers):
        prefix = f"layers.{index}." if index else "midlayer."
        tensors |= sizes.layer(prefix, width if index else 2 * width)
        tensors[f"{prefix}hidden_norm.weight"] = sizes.norm(width)
        tensors[f"{prefix}input_layernorm.weight"] = sizes.norm(width)
    if size:
        tensors["lm_head.weight"] = sizes.matrix(size, width, 4.0)
        tensors |= token_map(sizes.draft_tokens(size), sizes.vocab)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **sizes.config(layers),
        "draft_vocab_size": size or None,
        "target_hidden_size": sizes.target_hidden,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)},
    }
    return write(folder, {**config, **fields}, tensors)


def token_map(tokens: torch.Tensor, vocab: int) -> Tensors:
    """``d2t`` and ``t2d`` of the draft's tokens, int64[Vd] ids of the target."""
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": mask}


def write_standalone(
    folder: Path, target: Path, *, noise: float = 0.0, seed: int = 7, **fields: Any
) -> Path:
    """The target itself as a STANDALONE draft; ``noise``: how far its matrices are off, relative.

    0 gives a draft whose proposals are all accepted.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        spread = tensor.float().std(correction=0) if tensor.dim() > 1 else 0.0
        off = torch.randn(tensor.shape, generator=generator) * spread * noise
        tensors[name] = (tensor + off).to(tensor.dtype)
    config = json.loads((target / "config.json").read_text())
    return write(folder, {**config, **fields}, tensors)


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A draft's folder; None in ``config`` leaves a field out."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(said))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder
