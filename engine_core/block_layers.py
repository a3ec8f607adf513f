"""The layers of a block draft: a decoder like Qwen3's, and what its blocks see (1.2 and 1.3)."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from .block_fields import BlockFields, Json
from .field_errors import describe
from .model_config import ModelConfig, parse_model_config

_LATENT = ("kv_lora_rank", "q_lora_rank")
_EXPERTS = (
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
)
_NEOX = ("rope_is_neox_style", "is_neox_style")
_ROPE = ("rope_scaling", "rope_parameters")
# How ModelConfig says which layers slide; a block draft says it by layer_types alone.
_SLIDING = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_DEFAULT_POSITIONS = 32_768


class BlockLayers(NamedTuple):
    """``model``: the layers, as long as the target's context; ``causal``: see BlockConfig."""

    model: ModelConfig
    causal: tuple[bool, ...]


def block_layers(fields: BlockFields, target: ModelConfig, path: Path) -> BlockLayers:
    """The layers that config.json at ``path`` describes. Raises ValueError, ModelConfigError."""
    _refuse_others(fields)
    raw = _decoder_json(fields, target)
    # Positions go as far as the target's: rotary embeddings do not care what a config says.
    model = parse_model_config(msgspec.json.encode(raw), path)
    windows, causal = _sight(fields, model.num_hidden_layers)
    model = msgspec.structs.replace(
        model, sliding_windows=windows, context_length=target.context_length
    )
    return BlockLayers(model, causal)


def _refuse_others(fields: BlockFields) -> None:
    """What would change the mathematics and cannot be run."""
    layers = fields.layers
    for name in _LATENT:
        if name in layers:
            raise ValueError(
                f"{name}: {_text(layers[name])}, multi-head latent attention, cannot be run; use a "
                "draft with plain attention"
            )
    for name in _EXPERTS:
        count = _text(layers.get(name, fields.top.get(name, msgspec.Raw(b"0"))))
        if count not in ("0", "1"):
            raise ValueError(f"{name}: {count}, experts, cannot be run; use a dense draft")
    for name in _NEOX:
        if fields.find(name, bool) is False:
            raise ValueError(
                f"{name}: false, rotary embeddings of neighbouring elements, cannot be run; use a "
                "draft that rotates halves"
            )
    if fields.find("attention_sink_bias", bool):
        raise ValueError(
            "attention_sink_bias: true, but attention has no sinks here; use a draft without"
        )


def _decoder_json(fields: BlockFields, target: ModelConfig) -> Json:
    raw = {name: value for name, value in fields.layers.items() if name not in _SLIDING}
    for name in ("quantization_config", "dtype", "torch_dtype"):
        if name in fields.top:
            raw.setdefault(name, fields.top[name])
    defaults: dict[str, object] = {
        "vocab_size": target.vocab_size,
        "max_position_embeddings": _DEFAULT_POSITIONS,
    }
    heads, hidden = fields.find("num_attention_heads", int), fields.find("hidden_size", int)
    if heads is not None and hidden is not None and heads > 0:
        defaults["num_key_value_heads"] = heads
        if "head_dim" not in raw and hidden % heads:
            raise ValueError(
                f"head_dim: missing, and hidden_size {hidden} is not a multiple of "
                f"num_attention_heads {heads}; write head_dim"
            )
        defaults["head_dim"] = hidden // heads
    raw |= {n: _raw(value) for n, value in defaults.items() if n not in raw}
    for name in _ROPE:
        if name in raw:
            raw[name] = _whole_rope(name, raw[name], raw.get("head_dim"))
    return raw | {"architectures": _raw(["Qwen3ForCausalLM"]), "tie_word_embeddings": _raw(False)}


def _whole_rope(name: str, rope: msgspec.Raw, head_dim: msgspec.Raw | None) -> msgspec.Raw:
    """``rope_dim`` is the rotary width, whatever a partial factor beside it says."""
    try:
        fields = msgspec.json.decode(rope, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise ValueError(describe(error, bytes(rope), name)) from None
    width = fields.pop("rope_dim", None)
    if width is None or bytes(width) == b"null":
        return rope
    if head_dim is None or bytes(width) != bytes(head_dim):
        raise ValueError(
            f"{name}.rope_dim: {_text(width)}, rotary embeddings over a part of the head, cannot "
            "be run; use a draft that rotates all of it"
        )
    fields.pop("partial_rotary_factor", None)
    return _raw(fields)


def _sight(fields: BlockFields, layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Window of each layer, 0 for all positions, and whether its blocks look ahead not at all."""
    types = fields.find("layer_types", tuple[str, ...])
    window = fields.find("sliding_window", int)
    if types is None:
        if fields.find("use_sliding_window", bool) and window is not None:
            raise ValueError(
                "layer_types: missing beside use_sliding_window; write full_attention or "
                "sliding_attention for each layer"
            )
        types = ("full_attention",) * layers
    if len(types) < layers:
        raise ValueError(
            f"layer_types: has {len(types)} entries for {layers} layers; write one for each"
        )
    for name in types[:layers]:
        if name not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer_types: {name!r} cannot be run; use a draft of full_attention and "
                "sliding_attention"
            )
    slides = [name == "sliding_attention" for name in types[:layers]]
    if any(slides) and (window is None or window < 1):
        raise ValueError(
            f"sliding_window: must be 1 or more for layers of sliding_attention, is {window}; "
            "write how many positions they see, their own included"
        )
    always = fields.find("is_causal", bool)
    ahead = bool(fields.find("sliding_window_non_causal", bool))
    causal = (always if always is not None else slid and not ahead for slid in slides)
    return tuple((window or 0) * slid for slid in slides), tuple(causal)


def _text(value: msgspec.Raw) -> str:
    return bytes(value).decode()


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
