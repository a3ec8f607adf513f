"""Tiny random block drafts for a tiny target, as each trainer would write them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from .draft_checkpoints import Sizes, Tensors, write

Exporter = Literal["z-lab", "specforge", "prefixed", "speculators"]
RANK = 6


def write_block(
    folder: Path,
    target: Path,
    algorithm: Literal["DFLASH", "DSPARK"] = "DFLASH",
    *,
    exporter: Exporter = "z-lab",
    layers: int = 2,
    size: int = 4,
    layer_ids: tuple[int, ...] = (0, 1, 2),
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla",
    rank: int = RANK,
    confidence: Literal["none", "hidden", "markov"] = "markov",
    bias: bool = False,
    seed: int = 8,
    nested: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A draft of ``layers`` layers over outputs of the target's ``layer_ids``.

    ``size``: block_size as the exporter counts it. ``nested`` are added to ``dflash_config``,
    ``fields`` to config.json.
    """
    sizes = Sizes(target, seed)
    hidden = sizes.hidden
    tensors: Tensors = {
        "fc.weight": sizes.matrix(hidden, len(layer_ids) * hidden),
        "hidden_norm.weight": sizes.norm(hidden),
        "norm.weight": sizes.norm(hidden),
    }
    for index in range(layers):
        prefix = f"layers.{index}."
        tensors |= sizes.layer(prefix, hidden, qkv_bias=bias, qk_norm=True)
        tensors[f"{prefix}input_layernorm.weight"] = sizes.norm(hidden)
        if bias:
            tensors[f"{prefix}self_attn.o_proj.bias"] = sizes.norm(hidden)
    said: dict[str, Any] = {"mask_token_id": sizes.vocab - 1, "target_layer_ids": list(layer_ids)}
    if algorithm == "DSPARK":
        tensors |= _heads(sizes, markov, rank, confidence)
        said |= {"markov_rank": rank, "markov_head_type": markov}
    said |= nested or {}
    config = {
        "architectures": ["DFlashDraftModel" if algorithm == "DFLASH" else "DSparkDraftModel"],
        **sizes.config(layers),
        "attention_bias": bias or None,
        "block_size": size,
    }
    if exporter == "prefixed":
        said["noise_token_id"] = said.pop("mask_token_id")
        said["block_size"] = config.pop("block_size")
        config |= {f"dspark_{name}": value for name, value in said.items()}
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    elif exporter == "speculators":
        return _speculators(folder, algorithm, config, said, tensors, fields)
    elif exporter == "specforge" or algorithm == "DFLASH":
        config["dflash_config"] = said
    else:
        config |= said
    return write(folder, {**config, **fields}, tensors)


def _heads(sizes: Sizes, markov: str, rank: int, confidence: str) -> Tensors:
    hidden, vocab = sizes.hidden, sizes.vocab
    tensors = {
        "markov_head.markov_w1.weight": sizes.matrix(vocab, rank),
        "markov_head.markov_w2.weight": sizes.matrix(vocab, rank),
    }
    if markov == "gated":
        tensors["markov_head.gate_proj.weight"] = sizes.matrix(rank, hidden + rank)
        tensors["markov_head.gate_proj.bias"] = sizes.norm(rank)
    if markov == "rnn":
        tensors["markov_head.joint_proj.weight"] = sizes.matrix(3 * rank, 2 * rank + hidden)
        tensors["markov_head.joint_proj.bias"] = sizes.norm(3 * rank)
    if confidence != "none":
        width = hidden + rank * (confidence == "markov")
        tensors["confidence_head.proj.weight"] = sizes.matrix(1, width)
        tensors["confidence_head.proj.bias"] = sizes.norm(1)
    return tensors


def _speculators(
    folder: Path,
    algorithm: str,
    layer: dict[str, Any],
    said: dict[str, Any],
    tensors: Tensors,
    fields: dict[str, Any],
) -> Path:
    inside = {k: v for k, v in layer.items() if k not in ("architectures", "block_size")}
    outside = {k: v for k, v in said.items() if k != "target_layer_ids"}
    config = {
        "architectures": layer["architectures"],
        "speculators_model_type": algorithm.lower(),
        "transformer_layer_config": {"model_type": "qwen3", **inside},
        "aux_hidden_state_layer_ids": [i + 1 for i in said["target_layer_ids"]],
        "block_size": layer["block_size"],
        "draft_vocab_size": layer["vocab_size"],
        "sample_from_anchor": algorithm == "DSPARK",
        "speculators_config": {"algorithm": algorithm.lower(), "proposal_methods": []},
        **outside,
    }
    return write(folder, {**config, **fields}, tensors)


@dataclass(frozen=True)
class BlockKind:
    """One variant of one format, and how many tokens it drafts."""

    algorithm: Literal["DFLASH", "DSPARK"]
    write: Callable[[Path, Path], Path]
    drafts: int
    first_row: int


def _dflash(**options: Any) -> BlockKind:
    return BlockKind("DFLASH", partial(write_block, algorithm="DFLASH", **options), 3, 1)


def _dspark(drafts: int = 4, first_row: int = 0, **options: Any) -> BlockKind:
    made = partial(write_block, algorithm="DSPARK", **options)
    return BlockKind("DSPARK", made, drafts, first_row)


_SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}
BLOCKS = {
    "dflash": _dflash(),
    "dflash-bias": _dflash(bias=True, layers=1),
    "dflash-shuffled": _dflash(layer_ids=(2, 0, 1)),
    "dflash-repeated": _dflash(layer_ids=(1, 1)),
    "dflash-sliding": _dflash(**_SLIDING),
    "dflash-gemma": _dflash(use_gemma_norm=True, nested={"attention_value_scale": 0.3}),
    "dflash-speculators": _dflash(exporter="speculators"),
    "dspark": _dspark(),
    "dspark-specforge": _dspark(exporter="specforge", markov="gated", confidence="hidden"),
    "dspark-prefixed": _dspark(exporter="prefixed"),
    "dspark-no-confidence": _dspark(confidence="none", enable_confidence_head=False),
    "dspark-rnn": _dspark(markov="rnn", **_SLIDING),
    "dspark-filled": _dspark(first_row=1, sample_from_anchor=False),
    "dspark-speculators": _dspark(exporter="speculators", markov="rnn"),
    "dspark-speculators-filled": _dspark(
        3, 1, exporter="speculators", markov="gated", sample_from_anchor=False
    ),
}


def random_features(tokens: int, width: int, seed: int = 4) -> torch.Tensor:
    """float32[tokens, width] as a target might give them."""
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
