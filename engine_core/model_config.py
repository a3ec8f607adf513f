"""What a model is, read strictly from its folder's config.json and generation_config.json."""

from pathlib import Path
from typing import Literal

import msgspec

from .field_errors import describe
from .rope_config import RawRope, RopeConfig, parse_rope

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Fields of other model families that change the mathematics: a checkpoint that sets one is
# not the plain dense decoder its architecture name promises.
_FOREIGN_FIELDS = (
    "attn_logit_softcapping",
    "embedding_multiplier",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "num_experts",
    "num_local_experts",
    "residual_multiplier",
)
_MISTRAL_DEFAULT_WINDOW = 4096


class ModelConfigError(ValueError):
    """A config.json that is malformed or describes a model that cannot be run."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder. Sizes count elements; token ids are ids of ``vocab_size``.

    ``sliding_windows`` has one entry per layer: how many positions a token sees, itself included,
    or 0 for all of them. ``torch_dtype`` is the checkpoint's own type, e.g. "bfloat16".
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    sliding_windows: tuple[int, ...]
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str

    @property
    def q_size(self) -> int:
        """Width of the concatenated query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the concatenated key (or value) heads."""
        return self.num_key_value_heads * self.head_dim


class _Raw(msgspec.Struct, frozen=True):
    """The typed fields of config.json; msgspec names the one that has a wrong type."""

    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: RawRope | None = None
    rope_parameters: RawRope | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    bos_token_id: int | None = None
    torch_dtype: str | None = None
    dtype: str | None = None


class _GenerationConfig(msgspec.Struct, frozen=True):
    eos_token_id: int | tuple[int, ...] | None = None


def load_model_config(folder: Path) -> ModelConfig:
    """The config of the model in ``folder``. Raises ModelConfigError naming file and field."""
    path = folder / "config.json"
    return parse_model_config(read_config(path), path)


def read_config(path: Path) -> bytes:
    """The text of a config.json. Raises ModelConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelConfigError(
            f"{path}: cannot be read ({error.strerror}); a model folder needs a config.json"
        ) from None


def parse_model_config(text: bytes, path: Path) -> ModelConfig:
    """The config that ``text`` describes; ``path`` is where it comes from, and what lies beside it
    is read too. Raises ModelConfigError naming file and field.
    """
    generation = path.parent / "generation_config.json"
    generation_text = generation.read_bytes() if generation.is_file() else b"{}"
    try:
        extra = msgspec.json.decode(generation_text, type=_GenerationConfig)
    except msgspec.MsgspecError as error:
        raise ModelConfigError(f"{generation}: {describe(error, generation_text)}") from None
    try:
        return _resolve(_decode(text), extra)
    except msgspec.MsgspecError as error:
        raise ModelConfigError(f"{path}: {describe(error, text)}") from None
    except ValueError as error:
        raise ModelConfigError(f"{path}: {error}") from None


def _decode(text: bytes) -> _Raw:
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    architectures = msgspec.json.decode(fields.get("architectures", b"null"), type=object)
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ValueError(
            f"architectures: expected a list with one name, found {architectures!r}; use a model "
            f"of one of {', '.join(_ARCHITECTURES)}"
        )
    if architectures[0] not in _ARCHITECTURES:
        raise ValueError(
            f"architectures: {architectures[0]!r} is not supported; use a model of one of "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if bytes(fields.get("quantization_config", b"null")) != b"null":
        raise ValueError(
            "quantization_config: quantized checkpoints are not supported; use the "
            "bfloat16, float16 or float32 checkpoint of the model"
        )
    for name in _FOREIGN_FIELDS:
        if bytes(fields.get(name, b"null")) not in (b"null", b"1", b"1.0"):
            raise ValueError(
                f"{name}: is not part of {architectures[0]} and would change its outputs; "
                "use the original checkpoint, or remove the field if it has no effect"
            )
    return msgspec.json.decode(text, type=_Raw)


def _resolve(raw: _Raw, generation: _GenerationConfig) -> ModelConfig:
    architecture = _ARCHITECTURES[raw.architectures[0]]
    if raw.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act: {raw.hidden_act!r} is not supported; use a model with silu")
    if raw.partial_rotary_factor not in (None, 1.0):
        raise ValueError(
            f"partial_rotary_factor: {raw.partial_rotary_factor} is not supported; use a model "
            "with 1.0"
        )
    kv_heads = _kv_heads(raw, architecture)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_hidden_layers=raw.num_hidden_layers,
        num_attention_heads=raw.num_attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=_head_dim(raw, architecture),
        rms_norm_eps=raw.rms_norm_eps,
        rope=parse_rope(
            raw.rope_scaling, raw.rope_parameters, raw.rope_theta, raw.max_position_embeddings
        ),
        qkv_bias=architecture == "qwen2"
        or (architecture in ("llama", "qwen3") and raw.attention_bias),
        o_bias=architecture in ("llama", "qwen3") and raw.attention_bias,
        mlp_bias=architecture == "llama" and raw.mlp_bias,
        qk_norm=architecture == "qwen3",
        tie_word_embeddings=raw.tie_word_embeddings,
        sliding_windows=_sliding_windows(raw, architecture),
        context_length=raw.max_position_embeddings,
        eos_token_ids=_eos_ids(raw, generation),
        bos_token_id=raw.bos_token_id,
        torch_dtype=raw.dtype or raw.torch_dtype or "float32",
    )
    _check_sizes(config, raw)
    return config


def _kv_heads(raw: _Raw, architecture: Architecture) -> int:
    if raw.num_key_value_heads is not None:
        return raw.num_key_value_heads
    if architecture == "llama":
        return raw.num_attention_heads
    raise ValueError(
        f"num_key_value_heads: missing; {raw.architectures[0]} needs it, write the number of "
        "key/value heads"
    )


def _head_dim(raw: _Raw, architecture: Architecture) -> int:
    if raw.head_dim is not None:
        return raw.head_dim
    if architecture == "qwen3":
        return 128
    if raw.num_attention_heads < 1 or raw.hidden_size % raw.num_attention_heads:
        raise ValueError(
            f"head_dim: missing, and hidden_size {raw.hidden_size} is not a multiple of "
            f"num_attention_heads {raw.num_attention_heads}; write head_dim"
        )
    return raw.hidden_size // raw.num_attention_heads


def _sliding_windows(raw: _Raw, architecture: Architecture) -> tuple[int, ...]:
    """One window per layer; 0 is full attention."""
    layers = raw.num_hidden_layers
    given = raw.sliding_window
    window = given if isinstance(given, int) else None
    if window is not None and window < 1:
        raise ValueError(f"sliding_window: must be at least 1 or null, is {window}; correct it")
    types = raw.layer_types
    if types is not None and len(types) != layers:
        raise ValueError(
            f"layer_types: has {len(types)} entries for {layers} layers; write one for each"
        )
    for name in types or ():
        if name not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer_types: {name!r} is not supported; use full_attention or sliding_attention"
            )
    slides = types is not None and "sliding_attention" in types
    match architecture:
        case "llama":
            if slides:
                raise ValueError(
                    "layer_types: sliding_attention is none of LlamaForCausalLM's; write "
                    "full_attention"
                )
            return (0,) * layers
        case "mistral":
            if given is msgspec.UNSET:
                window = _MISTRAL_DEFAULT_WINDOW
            if types is not None and slides != (window is not None):
                raise ValueError(
                    "layer_types: contradicts sliding_window; MistralForCausalLM uses one window "
                    "for all layers, remove layer_types"
                )
            if slides and "full_attention" in (types or ()):
                raise ValueError(
                    "layer_types: mixed layers are not supported for MistralForCausalLM; it uses "
                    "one window for all layers"
                )
            return (window or 0,) * layers
        case "qwen2" | "qwen3":
            if not raw.use_sliding_window:
                window = None
            if slides and window is None:
                raise ValueError(
                    "layer_types: has sliding_attention, but use_sliding_window is false or "
                    "sliding_window is missing; set both or make the layers full_attention"
                )
            if types is not None:
                return tuple((window or 0) if t == "sliding_attention" else 0 for t in types)
            if window is None:
                return (0,) * layers
            if raw.max_window_layers is None:
                raise ValueError(
                    "max_window_layers: missing; with use_sliding_window write it or layer_types"
                )
            return tuple(window if i >= raw.max_window_layers else 0 for i in range(layers))


def _eos_ids(raw: _Raw, generation: _GenerationConfig) -> tuple[int, ...]:
    """Ids of both files, without repeats: a chat model's extra end tokens are in the second."""
    ids: list[int] = []
    for value in (raw.eos_token_id, generation.eos_token_id):
        if isinstance(value, int):
            ids.append(value)
        elif value is not None:
            ids.extend(value)
    return tuple(dict.fromkeys(ids))


def _check_sizes(config: ModelConfig, raw: _Raw) -> None:
    for name, value in (
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_hidden_layers", config.num_hidden_layers),
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", config.num_key_value_heads),
        ("head_dim", config.head_dim),
        ("max_position_embeddings", config.context_length),
    ):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, is {value}; correct it")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads: {config.num_key_value_heads} does not divide "
            f"num_attention_heads {config.num_attention_heads}; correct one of them"
        )
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim: rotary embeddings need an even number, is {config.head_dim}; correct it"
        )
    if not 0.0 < raw.rms_norm_eps < 1.0:
        raise ValueError(
            f"rms_norm_eps: must be between 0 and 1, is {raw.rms_norm_eps}; correct it"
        )
    for token in config.eos_token_ids:
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"eos_token_id: {token} is outside the vocabulary of {config.vocab_size} tokens; "
                "correct it"
            )
