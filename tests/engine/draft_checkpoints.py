"""Tiny random drafts for a tiny target, as each trainer would write them."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
_BARE = ("lm_head.weight", "d2t", "t2d")


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

    def layer(
        self, prefix: str, width: int, *, qkv_bias: bool = False, qk_norm: bool = False
    ) -> Tensors:
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
        for name in "qkv" if qkv_bias else "":
            rows = shapes[f"self_attn.{name}_proj"][0]
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = self.norm(rows)
        for name in "qk" if qk_norm else "":
            tensors[f"{prefix}self_attn.{name}_norm.weight"] = self.norm(size)
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
    trainer: Literal["official", "sglang-qwen2", "speculators"] = "official",
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
        layer = sizes.layer(prefix, hidden, qkv_bias=trainer == "sglang-qwen2")
        if agrees:
            layer = {name: tensor * 0.01 for name, tensor in layer.items()}
        tensors |= layer
        if index:
            tensors[f"{prefix}input_layernorm.weight"] = sizes.norm(hidden)
    config = {"architectures": ["LlamaForCausalLM"], "bias": bias, **sizes.config(layers)}
    if trainer == "sglang-qwen2":
        config["architectures"] = ["Qwen2ForCausalLMEagle"]
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    if trainer == "speculators":
        del config["bias"]
        fields = {"fusion_bias": bias, "layernorms": False, **fields}
        return write_speculators(folder, "eagle", config, tensors, fields)
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
    trainer: Literal["official", "specforge", "sglang", "speculators"] = "official",
    chunk_norms: bool = False,
    input_norm: bool = False,
    qk_norm: bool = False,
    uses_final: bool = False,
    **fields: Any,
) -> Path:
    """EAGLE3, as its authors write it: ``midlayer``, a head and a vocabulary of its own.

    ``draft_vocab``: half of the target's by default; 0 shares the target's head.
    ``layer_ids``: layers whose outputs it takes, by default three that any target has;
    ``uses_final``: the final hidden state instead. The norms are in front of fc, of each layer's
    features or of all of them. ``fields`` are added to config.json.
    """
    sizes = Sizes(target, seed, hidden)
    count = sizes.target["num_hidden_layers"]
    ids = (-1, (count - 1) // 2, count - 1) if layer_ids is None else layer_ids
    size = sizes.vocab // 2 if draft_vocab is None else draft_vocab
    width, wide = sizes.hidden, max(len(ids), 1) * sizes.target_hidden
    tensors = {"norm.weight": sizes.norm(width)}
    if not uses_final:
        tensors["fc.weight"] = sizes.matrix(width, wide)
    if width != sizes.target_hidden or trainer == "speculators":
        tensors["embed_tokens.weight"] = sizes.matrix(sizes.vocab, width)
    if input_norm:
        tensors["input_norm.weight"] = sizes.norm(wide)
    for index, name in enumerate(("low", "mid", "high")[: len(ids) * chunk_norms]):
        theirs = f"aux_norm_{name}" if trainer == "official" else f"fc_norm.{index}"
        tensors[f"{theirs}.weight"] = sizes.norm(sizes.target_hidden)
    for index in range(layers):
        prefix = f"layers.{index}."
        if index == 0 and trainer in ("official", "specforge"):
            prefix = "midlayer."
        tensors |= sizes.layer(prefix, width if index else 2 * width, qk_norm=qk_norm)
        tensors[f"{prefix}input_layernorm.weight"] = sizes.norm(width)
        if index == 0 or trainer != "speculators":
            tensors[f"{prefix}hidden_norm.weight"] = sizes.norm(width)
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
    if uses_final:
        config["eagle_config"] = {"use_aux_hidden_state": False}
    if trainer == "sglang":
        tensors = {n if n in _BARE else f"model.{n}": tensor for n, tensor in tensors.items()}
    if trainer == "speculators":
        config["model_type"] = "qwen3" if qk_norm else "llama"
        outside = {"draft_vocab_size", "target_hidden_size", "eagle_config"}
        layer = {name: value for name, value in config.items() if name not in outside}
        said = {
            "draft_vocab_size": size,
            "target_hidden_size": sizes.target_hidden,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
        }
        return write_speculators(folder, "eagle3", layer, tensors, {**said, **fields})
    return write(folder, {**config, **fields}, tensors)


def write_speculators(
    folder: Path, kind: str, layer: dict[str, Any], tensors: Tensors, fields: dict[str, Any]
) -> Path:
    """The format of the speculators library: its layers' config is a part of config.json."""
    layer = {name: value for name, value in layer.items() if name != "architectures"}
    renames = {} if kind == "eagle3" else {"layers.0.": "transformer.", "fc.": "fusion_fc."}
    named: Tensors = {}
    for name, tensor in tensors.items():
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs, 1) if name.startswith(ours) else name
        named[name] = tensor
    config = {
        "architectures": ["EagleSpeculator" if kind == "eagle" else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.4.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "a/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {"model_type": "llama", **layer},
    }
    return write(folder, {**config, **fields}, named)


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


@dataclass(frozen=True)
class DraftKind:
    """One variant of one format: how it is written, and which equations it has."""

    algorithm: Literal["EAGLE", "EAGLE3"]
    write: Callable[[Path, Path], Path]
    equations: dict[str, Any] = field(default_factory=dict)
    hot: int = 0  # tokens of a token map


def _eagle(hot: int = 0, **options: Any) -> DraftKind:
    return DraftKind("EAGLE", partial(write_eagle, **options), hot=hot)


def _eagle3(equations: dict[str, Any] | None = None, **options: Any) -> DraftKind:
    return DraftKind("EAGLE3", partial(write_eagle3, **options), equations or {})


DRAFTS = {
    "eagle": _eagle(),
    "eagle-deep": _eagle(layers=3, bias=False),
    "eagle-qwen2": _eagle(trainer="sglang-qwen2"),
    "eagle-hot": _eagle(hot=20, hot_vocab_size=20),
    "eagle-speculators": _eagle(trainer="speculators"),
    "eagle3": _eagle3(),
    "eagle3-sglang": _eagle3(trainer="sglang", layers=2, bias=None),
    "eagle3-specforge": _eagle3(
        {"chunks": 3, "norm_output": True},
        trainer="specforge",
        chunk_norms=True,
        fc_norm=True,
        norm_output=True,
        eagle_config=None,
        eagle_aux_hidden_state_layer_ids=(0, 2, 3),
    ),
    "eagle3-shared-head": _eagle3(draft_vocab=0, layers=2),
    "eagle3-narrow": _eagle3(hidden=24),
    "eagle3-final-state": _eagle3(uses_final=True),
    "eagle3-old-norms": _eagle3({"chunks": 3}, chunk_norms=True, use_aux_norm=True),
    "eagle3.1": _eagle3(
        {"chunks": 3, "norm_output": True},
        trainer="sglang",
        chunk_norms=True,
        fc_norm=True,
        norm_output=True,
    ),
    "eagle3-input-norm": _eagle3({"norm_before_fc": True}, input_norm=True, norm_before_fc=True),
    "eagle3-speculators": _eagle3({"norm_before_residual": True}, trainer="speculators", layers=2),
    "eagle3-speculators-qwen3": _eagle3(
        {"norm_before_fc": True, "norm_output": True},
        trainer="speculators",
        qk_norm=True,
        input_norm=True,
        norm_before_fc=True,
        norm_output=True,
        norm_before_residual=False,
    ),
}
