"""A draft as a folder: config.json, model.safetensors, and a model card."""

import json
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from ...engine_core.model_config import ModelConfig
from ...engine_core.rope_config import RopeConfig
from ...engine_core.train_spec import TrainSpec, serving_shape
from .recipe import Exported

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def draft_config(architecture: str, model: ModelConfig, spec: TrainSpec) -> dict[str, object]:
    """config.json's fields of a dense draft; under "outrider" how it serves best, and the length of
    the texts that it was trained on.
    """
    eos = model.eos_token_ids
    return {
        "architectures": [architecture],
        "model_type": model.architecture,
        "attention_bias": model.o_bias,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.context_length,
        "mlp_bias": model.mlp_bias,
        "num_attention_heads": model.num_attention_heads,
        "num_hidden_layers": model.num_hidden_layers,
        "num_key_value_heads": model.num_key_value_heads,
        "rms_norm_eps": model.rms_norm_eps,
        **_rope_fields(model.rope),
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": model.vocab_size,
        "outrider": {
            **msgspec.structs.asdict(serving_shape(spec)),
            "trained_length": spec.sequence_length,
        },
    }


def write_draft(
    folder: Path, exported: Exported, card: str, tokenizer_of: Path | None = None
) -> None:
    """Write a draft; ``tokenizer_of``: the folder whose tokenizer it shares, to be copied."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(exported.config, indent=1) + "\n")
    tensors = {name: tensor.contiguous().cpu() for name, tensor in exported.tensors.items()}
    weights = folder / WEIGHTS
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    (folder / "README.md").write_text(card)
    for name in _TOKENIZER if tokenizer_of is not None else ():
        assert tokenizer_of is not None
        if (tokenizer_of / name).is_file():
            shutil.copyfile(tokenizer_of / name, folder / name)


def tensor_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """What they take in memory."""
    return sum(tensor.nbytes for tensor in tensors.values())


def _rope_fields(rope: RopeConfig) -> dict[str, object]:
    fields: dict[str, object] = {"rope_theta": rope.theta}
    if rope.rope_type == "linear":
        fields["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    elif rope.rope_type == "llama3":
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    return fields
