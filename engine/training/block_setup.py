"""What a block draft is made of before training: its layers, its features, its mask token."""

import msgspec

from ...engine_core.block_capture import spread_layers
from ...engine_core.model_config import ModelConfig
from ...engine_core.model_path import resolve_model
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.tokenizer_ids import find_mask, own_mask, read_tokenizer
from ...engine_core.train_spec import TrainSpec
from .draft_layer import check_heads

DEFAULT_LAYERS = 3


def check_block(spec: TrainSpec, target: ModelConfig) -> None:
    """Raises RefusedError for what no block draft of ``target`` can be."""
    for name in ("draft_vocab_size", "own_head"):
        if getattr(spec, name):
            reason = f"{spec.algorithm} reads the target's head; leave it out, or train EAGLE3"
            raise RefusedError(Refused(name, reason))
    block_model(spec, target)
    feature_layers(spec, target)
    mask_token(spec, target)


def block_model(spec: TrainSpec, target: ModelConfig) -> ModelConfig:
    """A Qwen3 as wide as the target, with its heads and MLP unless flags say otherwise.

    Raises RefusedError.
    """
    if spec.hidden_size not in (None, target.hidden_size):
        reason = f"must be the target's ({target.hidden_size}), whose embedding the draft reads"
        raise RefusedError(Refused("hidden_size", reason))
    heads = spec.num_attention_heads or target.num_attention_heads
    kv_heads = spec.num_key_value_heads or min(heads, target.num_key_value_heads)
    head_dim = spec.head_dim or target.head_dim
    check_heads(heads, kv_heads, head_dim)
    layers = spec.num_hidden_layers or DEFAULT_LAYERS
    return msgspec.structs.replace(
        target,
        architecture="qwen3",
        intermediate_size=spec.intermediate_size or target.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        sliding_windows=_windows(spec, layers),
    )


def _windows(spec: TrainSpec, layers: int) -> tuple[int, ...]:
    """Of each layer; 0: full."""
    if spec.sliding_window is None:
        return (0,) * layers
    wrong = next((layer for layer in spec.sliding_layers if not 0 <= layer < layers), None)
    if wrong is not None:
        reason = f"{wrong} is none of the draft's {layers} layers; give 0 to {layers - 1}"
        raise RefusedError(Refused("sliding_layers", reason))
    sliding = spec.sliding_layers or tuple(range(layers))
    return tuple(spec.sliding_window if layer in sliding else 0 for layer in range(layers))


def feature_layers(spec: TrainSpec, target: ModelConfig) -> tuple[int, ...]:
    """Target layers whose entering streams the draft takes: 1 is the first layer's output, which
    exports call layer 0. Raises RefusedError.
    """
    last = target.num_hidden_layers
    if spec.feature_layers is None:
        outputs = spread_layers(last, spec.num_hidden_layers or DEFAULT_LAYERS)
        if outputs is None:
            reason = f"have no default for a target of {last} layers; name some"
            raise RefusedError(Refused("feature_layers", reason))
        return tuple(i + 1 for i in outputs)
    layers = spec.feature_layers
    if (
        list(layers) != sorted(set(layers))
        or not layers
        or not 1 <= layers[0] <= layers[-1] <= last
    ):
        reason = f"must ascend within 1 to {last}, are {list(layers)}"
        raise RefusedError(Refused("feature_layers", reason))
    return layers


def mask_token(spec: TrainSpec, target: ModelConfig) -> int:
    """The id that stands for tokens to come. Raises RefusedError."""
    folder, given = resolve_model(spec.model), spec.mask_token_id
    try:
        mask = own_mask(folder)
        if mask is None and given is None:
            mask = find_mask(read_tokenizer(folder), None)
    except (OSError, msgspec.MsgspecError) as error:
        if given is None:
            raise _no_mask(f"cannot be looked up in {folder}: {error}") from None
        mask = None  # without a tokenizer the explicit id stands
    if given is not None and mask is not None and mask.id not in (None, given):
        reason = f"is {given}, but {mask.id} is the tokenizer's {mask.text}; leave it out"
        raise RefusedError(Refused("mask_token_id", reason))
    made = given
    if made is None and mask is not None:
        made = mask.id
        if made is None:
            raise _no_mask(f"the target's tokenizer has no {mask.text}")
    assert made is not None, "without an id there is a mask, or an error"
    if not 0 <= made < target.vocab_size:
        reason = f"{made} is outside the target's vocabulary of {target.vocab_size}; name another"
        raise RefusedError(Refused("mask_token_id", reason))
    return made


def _no_mask(why: str) -> RefusedError:
    return RefusedError(Refused("mask_token_id", f"{why}; name an id that text does not use"))
