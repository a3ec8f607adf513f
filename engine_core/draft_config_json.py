"""The config.json of a draft model, in any of the formats that trainers write."""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import assert_never

import msgspec

from .block_config_json import parse_block_config
from .draft_config import DraftAlgorithm, DraftConfig, SpecShape
from .draft_fields import DraftFields, decode_fields, layers_json
from .draft_names import our_name
from .field_errors import describe
from .model_config import (
    ModelConfig,
    ModelConfigError,
    load_model_config,
    parse_model_config,
    read_config,
)
from .safetensors_header import HeaderError, tensor_dtypes
from .spec_shape import refuse_shape


def load_draft_config(
    folder: Path, target: ModelConfig, algorithm: DraftAlgorithm, tokenizer: Path | None = None
) -> DraftConfig:
    """The draft of ``folder`` for ``target``, whose ``context_length`` is the one that is served.

    ``tokenizer``: folder of the target's, which a DFLASH draft may need for its mask token.

    What config.json does not say of biases and norms is taken from the names in the checkpoint, if
    there is one. Raises ModelConfigError naming file and field: for a config that is malformed,
    that describes no draft of ``algorithm``, or whose draft does not fit the target.
    """
    config = parse_draft_config(folder, target, algorithm, tokenizer)
    for reason in misfits(config, target):
        raise ModelConfigError(f"{folder / 'config.json'}: {reason}")
    return config


def parse_draft_config(
    folder: Path, target: ModelConfig, algorithm: DraftAlgorithm, tokenizer: Path | None = None
) -> DraftConfig:
    """As ``load_draft_config``, but whether the draft fits the target is ``misfits``' to say."""
    path = folder / "config.json"
    try:
        text = read_config(path)
        if algorithm == "DFLASH" or algorithm == "DSPARK":
            return parse_block_config(text, path, target, algorithm, tokenizer)
        fields = decode_fields(text)
        if algorithm == "STANDALONE":
            config = _standalone(load_model_config(folder), fields)
        else:
            names = _tensor_names(folder)
            model = parse_model_config(layers_json(text, fields, algorithm), path)
            model = _with_biases(model, fields, names)
            if algorithm == "EAGLE":
                config = _eagle(model, fields, target, names)
            elif algorithm == "EAGLE3":
                config = _eagle3(model, fields, target, names)
            else:
                assert_never(algorithm)
    except ModelConfigError:
        raise
    except msgspec.MsgspecError as error:
        raise ModelConfigError(f"{path}: {describe(error, text)}") from None
    except ValueError as error:
        raise ModelConfigError(f"{path}: {error}") from None
    return config


def _tensor_names(folder: Path) -> set[str]:
    """Our names of the checkpoint's tensors; empty where there is none that can be read."""
    names: set[str] = set()
    with contextlib.suppress(HeaderError):  # loading says more of what is wrong
        names = {our_name(name) for name in tensor_dtypes(folder)}
    return names


def _with_biases(model: ModelConfig, fields: DraftFields, names: set[str]) -> ModelConfig:
    """The layers with the biases that the checkpoint has: configs say little of them."""
    if not names:
        said = fields.qkv_bias
        return model if said is None else msgspec.structs.replace(model, qkv_bias=said)
    first = "model.layers.0."
    return msgspec.structs.replace(
        model,
        qkv_bias=f"{first}self_attn.q_proj.bias" in names,
        o_bias=f"{first}self_attn.o_proj.bias" in names,
        mlp_bias=f"{first}mlp.down_proj.bias" in names,
    )


def _fc_bias(fields: DraftFields, names: set[str], default: bool) -> bool:
    said = fields.bias if fields.fusion_bias is None else fields.fusion_bias
    if said is not None:
        return said
    return "model.fc.bias" in names if names else default


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _standalone(model: ModelConfig, fields: DraftFields) -> DraftConfig:
    return DraftConfig(
        algorithm="STANDALONE",
        model=model,
        draft_vocab_size=model.vocab_size,
        owns_embedding=True,
        owns_head=True,
        defaults=_defaults(fields),
    )


def _eagle(
    model: ModelConfig, fields: DraftFields, target: ModelConfig, names: set[str]
) -> DraftConfig:
    if names and "model.fc.weight" not in names:
        raise ValueError(
            "architectures: the checkpoint is a whole model and no EAGLE draft, which has a tensor "
            "'fc.weight'; use --speculative-algorithm STANDALONE"
        )
    if fields.layernorms:
        raise ValueError(
            "layernorms: drafts with norms around fc and before the head cannot be run; use one "
            "that was trained with layernorms false"
        )
    return DraftConfig(
        algorithm="EAGLE",
        model=model,
        feature_size=target.hidden_size,
        draft_vocab_size=_given(fields.hot_vocab_size, model.vocab_size),
        owns_embedding=False,
        owns_head=False,
        hot_tokens=fields.hot_vocab_size is not None,
        fc_bias=_fc_bias(fields, names, default=True),
        first_layer_norm="model.layers.0.input_layernorm.weight" in names,
        defaults=_defaults(fields),
    )


def _eagle3(
    model: ModelConfig, fields: DraftFields, target: ModelConfig, names: set[str]
) -> DraftConfig:
    layers = _captured(fields, target.num_hidden_layers)
    count = max(len(layers), 1)
    if fields.num_aux_hidden_states not in (None, count):
        raise ValueError(
            f"num_aux_hidden_states: {fields.num_aux_hidden_states}, but {count} hidden states of "
            "the target are named by eagle_aux_hidden_state_layer_ids or by default; correct the "
            "one that is wrong"
        )
    width = _given(fields.target_hidden_size, model.hidden_size)
    if width != target.hidden_size:
        name = "hidden_size" if fields.target_hidden_size is None else "target_hidden_size"
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
    if fields.speculators_model_type is not None and fields.norm_before_residual is None:
        raise ValueError(
            "norm_before_residual: missing; say whether the first layer adds to the hidden state "
            "behind (true) or before (false) its norm, as in training"
        )
    eagle = fields.eagle_config
    before = eagle.norm_before_fc if fields.norm_before_fc is None else fields.norm_before_fc
    # The final hidden state of a target as wide as the draft needs no fc.
    fuses = bool(layers) or not shares_tables
    return DraftConfig(
        algorithm="EAGLE3",
        model=model,
        feature_layers=layers,
        feature_size=count * target.hidden_size,
        draft_vocab_size=_given(fields.draft_vocab_size, model.vocab_size),
        owns_embedding=not shares_tables or bool(fields.embed_requires_grad),
        owns_head=fields.draft_vocab_size is not None,
        has_fc=fuses,
        fc_bias=fuses and _fc_bias(fields, names, default=False),
        norm_before_fc=fuses and bool(before),
        chunk_norms=fuses and bool(fields.fc_norm or fields.use_aux_norm),
        norm_output=bool(fields.norm_output),
        norm_before_residual=bool(fields.norm_before_residual),
        defaults=_defaults(fields),
    )


def _captured(fields: DraftFields, num_layers: int) -> tuple[int, ...]:
    """Layers of a target of ``num_layers`` whose entering streams an EAGLE3 draft takes.

    SGLang's field numbers layers whose output is taken; the one at the top, of speculators and
    vLLM, numbers those whose input is. Neither: three that all trainers take.
    """
    if not fields.eagle_config.use_aux_hidden_state:
        return ()
    name = "eagle_aux_hidden_state_layer_ids"
    chosen: tuple[int, ...]
    if fields.eagle_config.eagle_aux_hidden_state_layer_ids is not None:
        chosen = tuple(i + 1 for i in fields.eagle_config.eagle_aux_hidden_state_layer_ids)
        name = f"eagle_config.{name}"
    elif fields.eagle_aux_hidden_state_layer_ids is not None:
        chosen = fields.eagle_aux_hidden_state_layer_ids
    else:
        chosen = (2, num_layers // 2, num_layers - 3)
    ascending = all(low < high for low, high in pairwise(chosen))
    if not chosen or not ascending or chosen[0] < 0 or chosen[-1] > num_layers:
        raise ValueError(
            f"{name}: the streams that enter layers {list(chosen)} do not exist, or not in this "
            f"order, in a target of {num_layers} layers; name those that the draft was trained on"
        )
    return chosen


def _defaults(fields: DraftFields) -> SpecShape | None:
    """The best serving shape that the config names."""
    shape = fields.outrider or fields.proposed_chain()
    if shape is None:
        return None
    refused = refuse_shape(shape)
    if refused is not None:
        raise ValueError(f"outrider.{refused.field}: {refused.reason}")
    return shape


def misfits(config: DraftConfig, target: ModelConfig) -> Iterator[str]:
    """Why the draft cannot draft for ``target``: the field, the reason and what to do, of each."""
    model = config.model
    if model.vocab_size != target.vocab_size:
        yield (
            f"vocab_size: {model.vocab_size} is not the target's {target.vocab_size}; use a draft "
            "with the target's tokenizer"
        )
    if not 1 <= config.draft_vocab_size <= target.vocab_size:
        name = "hot_vocab_size" if config.algorithm == "EAGLE" else "draft_vocab_size"
        yield (
            f"{name}: must be between 1 and the vocabulary's {target.vocab_size}, is "
            f"{config.draft_vocab_size}; use a draft with the target's tokenizer"
        )
    elif config.block is not None and config.draft_vocab_size != target.vocab_size:
        yield (
            f"draft_vocab_size: {config.draft_vocab_size} of the target's {target.vocab_size} "
            "tokens, but block drafts propose by the target's head; use one that was trained "
            "without a vocabulary of its own"
        )
    shares_width = config.algorithm == "EAGLE" or config.block is not None
    if shares_width and model.hidden_size != target.hidden_size:
        yield (
            f"hidden_size: {model.hidden_size} is not the target's {target.hidden_size}; use a "
            "draft that was trained for this target"
        )
    if model.context_length < target.context_length:
        yield (
            f"max_position_embeddings: {model.context_length} is shorter than the target's context "
            f"of {target.context_length}; serve with --context-length {model.context_length}, or "
            "raise it if the draft's rotary embedding reaches further"
        )
