"""The config.json of a draft model, in any of the formats that trainers write."""

from itertools import pairwise
from pathlib import Path
from typing import assert_never

import msgspec

from .draft_config import DraftAlgorithm, DraftConfig, SpecShape
from .model_config import (
    ModelConfig,
    ModelConfigError,
    load_model_config,
    parse_model_config,
    read_config,
)

# Draft architectures and the decoder that their layers are.
_BASES = {
    "EAGLE": {
        "LlamaForCausalLMEagle": "LlamaForCausalLM",
        "EagleLlamaForCausalLM": "LlamaForCausalLM",
        "LlamaForCausalLM": "LlamaForCausalLM",  # the repositories of EAGLE's authors
        "Qwen2ForCausalLMEagle": "Qwen2ForCausalLM",
        "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    },
    "EAGLE3": {
        "LlamaForCausalLMEagle3": "LlamaForCausalLM",
        "Eagle3LlamaForCausalLM": "LlamaForCausalLM",
        "LlamaForCausalLM": "LlamaForCausalLM",  # the repositories of EAGLE's authors
    },
}
_DEFAULT_FEATURES = 3


class _EagleConfig(msgspec.Struct, frozen=True):
    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    norm_before_fc: bool | None = None


class _Fields(msgspec.Struct, frozen=True):
    """What a draft's config.json says beyond a decoder's; null counts as unsaid."""

    architectures: tuple[str, ...] = ()
    hidden_size: int | None = None
    hot_vocab_size: int | None = None
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_aux_hidden_states: int | None = None
    eagle_config: _EagleConfig | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_output: bool | None = None
    bias: bool | None = None
    outrider: SpecShape | None = None


def load_draft_config(folder: Path, target: ModelConfig, algorithm: DraftAlgorithm) -> DraftConfig:
    """The draft of ``folder`` for ``target``, whose ``context_length`` is the one that is served.

    Raises ModelConfigError naming file and field: for a config that is malformed, that describes
    no draft of ``algorithm``, or whose draft does not fit the target.
    """
    path = folder / "config.json"
    try:
        text = read_config(path)
        fields = msgspec.json.decode(text, type=_Fields)
        match algorithm:
            case "STANDALONE":
                config = _standalone(load_model_config(folder), fields)
            case "EAGLE":
                config = _eagle(_layers(text, fields, path, algorithm, target), fields, target)
            case "EAGLE3":
                config = _eagle3(_layers(text, fields, path, algorithm, target), fields, target)
            case _:
                assert_never(algorithm)
        _check_fit(config, target)
    except ModelConfigError:
        raise
    except (ValueError, msgspec.MsgspecError) as error:
        raise ModelConfigError(f"{path}: {error}") from None
    return config


def _layers(
    text: bytes, fields: _Fields, path: Path, algorithm: DraftAlgorithm, target: ModelConfig
) -> ModelConfig:
    """The draft's layers as the decoder that they are."""
    bases = _BASES[algorithm]
    if len(fields.architectures) != 1 or fields.architectures[0] not in bases:
        raise ValueError(
            f"architectures: {list(fields.architectures)} is no {algorithm} draft that can be run; "
            f"use one of {', '.join(bases)}"
        )
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    base = bases[fields.architectures[0]]
    raw["architectures"] = msgspec.Raw(msgspec.json.encode([base]))
    return parse_model_config(msgspec.json.encode(raw), path)


def _standalone(model: ModelConfig, fields: _Fields) -> DraftConfig:
    return DraftConfig(
        algorithm="STANDALONE",
        model=model,
        draft_vocab_size=model.vocab_size,
        owns_embedding=True,
        owns_head=True,
        defaults=fields.outrider,
    )


def _eagle(model: ModelConfig, fields: _Fields, target: ModelConfig) -> DraftConfig:
    return DraftConfig(
        algorithm="EAGLE",
        model=model,
        feature_size=target.hidden_size,
        draft_vocab_size=fields.hot_vocab_size or model.vocab_size,
        owns_embedding=False,
        owns_head=False,
        hot_tokens=fields.hot_vocab_size is not None,
        fc_bias=fields.bias is not False,
        defaults=fields.outrider,
    )


def _eagle3(model: ModelConfig, fields: _Fields, target: ModelConfig) -> DraftConfig:
    eagle = fields.eagle_config or _EagleConfig()
    layers = feature_layers(
        target.num_hidden_layers,
        eagle.eagle_aux_hidden_state_layer_ids if eagle.use_aux_hidden_state else (),
    )
    count = max(len(layers), 1)
    if fields.num_aux_hidden_states not in (None, count):
        raise ValueError(
            f"num_aux_hidden_states: {fields.num_aux_hidden_states} is not the {count} of "
            "eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    width = fields.target_hidden_size or model.hidden_size
    if width != target.hidden_size:
        name = "target_hidden_size" if fields.target_hidden_size else "hidden_size"
        raise ValueError(
            f"{name}: {width} is not the target's {target.hidden_size}; use a draft that was "
            "trained for this target"
        )
    shares_tables = model.hidden_size == target.hidden_size
    if fields.draft_vocab_size is None and not shares_tables:
        raise ValueError(
            f"draft_vocab_size: missing, but a draft {model.hidden_size} wide cannot use the head "
            f"of a target {target.hidden_size} wide; use a checkpoint with a head of its own"
        )
    before = eagle.norm_before_fc if fields.norm_before_fc is None else fields.norm_before_fc
    return DraftConfig(
        algorithm="EAGLE3",
        model=model,
        feature_layers=layers,
        feature_size=count * target.hidden_size,
        draft_vocab_size=fields.draft_vocab_size or model.vocab_size,
        owns_embedding=not shares_tables,
        owns_head=fields.draft_vocab_size is not None,
        fc_bias=bool(fields.bias),
        norm_before_fc=bool(before),
        chunk_norms=bool(fields.fc_norm or fields.use_aux_norm),
        norm_output=bool(fields.norm_output),
        first_layer_norm=True,
        defaults=fields.outrider,
    )


def feature_layers(num_layers: int, layer_ids: tuple[int, ...] | None) -> tuple[int, ...]:
    """Layers of a target of ``num_layers`` whose entering streams an EAGLE3 draft takes.

    ``layer_ids``: those whose outputs it takes, ascending; None for the usual three, () for none.
    Raises ValueError naming the field.
    """
    if layer_ids is None:
        chosen: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
        name = "eagle_aux_hidden_state_layer_ids: missing, and the usual"
    else:
        chosen = tuple(layer + 1 for layer in layer_ids)
        name = "eagle_aux_hidden_state_layer_ids:"
    ascending = all(low < high for low, high in pairwise(chosen))
    if not ascending or any(not 0 <= layer <= num_layers for layer in chosen):
        raise ValueError(
            f"eagle_config.{name} {[layer - 1 for layer in chosen]} do not fit a target of "
            f"{num_layers} layers; name ascending layers from -1 to {num_layers - 1}"
        )
    return chosen


def _check_fit(config: DraftConfig, target: ModelConfig) -> None:
    model = config.model
    if model.vocab_size != target.vocab_size:
        raise ValueError(
            f"vocab_size: {model.vocab_size} is not the target's {target.vocab_size}; use a draft "
            "with the target's tokenizer"
        )
    if not 1 <= config.draft_vocab_size <= target.vocab_size:
        raise ValueError(
            f"draft_vocab_size: {config.draft_vocab_size} is not between 1 and the vocabulary's "
            f"{target.vocab_size}"
        )
    if config.algorithm == "EAGLE" and model.hidden_size != target.hidden_size:
        raise ValueError(
            f"hidden_size: {model.hidden_size} is not the target's {target.hidden_size}; use a "
            "draft that was trained for this target"
        )
    if model.context_length < target.context_length:
        raise ValueError(
            f"max_position_embeddings: {model.context_length} is shorter than the target's context "
            f"of {target.context_length}; serve with --context-length {model.context_length}, or "
            "raise it if the draft's rotary embedding reaches further"
        )
