"""Rotary position embedding settings, from either spelling that transformers has used."""

from typing import Literal, assert_never

import msgspec

RopeType = Literal["default", "linear", "llama3"]
_KNOWN_TYPES: dict[str, RopeType] = {"default": "default", "linear": "linear", "llama3": "llama3"}
_DEFAULT_THETA = 10000.0


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Frequencies ``theta ** (-2i / head_dim)``, scaled by ``rope_type``.

    "linear" divides all of them by ``factor``. "llama3" divides the low ones by ``factor``, keeps
    the high ones and blends between ``low_freq_factor`` and ``high_freq_factor`` wavelengths
    per ``original_max_position_embeddings`` tokens.
    """

    theta: float = _DEFAULT_THETA
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


class RawRope(msgspec.Struct, frozen=True):
    """``rope_scaling`` (transformers 4) or ``rope_parameters`` (transformers 5) as written."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    full_attention: msgspec.Raw = msgspec.Raw()
    sliding_attention: msgspec.Raw = msgspec.Raw()


def parse_rope(
    scaling: RawRope | None, parameters: RawRope | None, theta: float | None, max_positions: int
) -> RopeConfig:
    """One :class:`RopeConfig` from the raw fields of a config.json.

    ``scaling`` wins over ``parameters`` where both are given, and a theta inside either wins over
    the top-level one, as in transformers. Raises ValueError naming the field.
    """
    field = "rope_scaling" if scaling is not None else "rope_parameters"
    raw = scaling or parameters or RawRope()
    if bytes(raw.full_attention) or bytes(raw.sliding_attention):
        raise ValueError(
            f"{field}: frequencies per layer type are not supported; use a model with one "
            "rope setting for all layers"
        )
    if raw.partial_rotary_factor not in (None, 1.0):
        raise ValueError(
            f"{field}.partial_rotary_factor: {raw.partial_rotary_factor} is not supported; use a "
            "model that rotates the entire head (1.0)"
        )
    name = raw.rope_type or raw.type or "default"
    rope_type = _KNOWN_TYPES.get(name)
    if rope_type is None:
        raise ValueError(
            f"{field}.rope_type: {name!r} is not supported; use one of "
            f"{', '.join(_KNOWN_TYPES)}, or remove the field to run inside the trained context"
        )
    chosen_theta = raw.rope_theta or theta or _DEFAULT_THETA
    if chosen_theta <= 0:
        raise ValueError(f"rope_theta: must be positive, is {chosen_theta}; correct it")
    match rope_type:
        case "default":
            return RopeConfig(theta=chosen_theta)
        case "linear":
            factor = _positive(field, "factor", raw.factor)
            return RopeConfig(theta=chosen_theta, rope_type="linear", factor=factor)
        case "llama3":
            low = _positive(field, "low_freq_factor", raw.low_freq_factor)
            high = _positive(field, "high_freq_factor", raw.high_freq_factor)
            if high <= low:
                raise ValueError(
                    f"{field}.high_freq_factor: must be above low_freq_factor ({low}), is {high}; "
                    "correct one of them"
                )
            original = raw.original_max_position_embeddings or max_positions
            return RopeConfig(
                theta=chosen_theta,
                rope_type="llama3",
                factor=_positive(field, "factor", raw.factor),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=original,
            )
        case _:
            assert_never(rope_type)


def _positive(field: str, name: str, value: float | None) -> float:
    if value is None or value <= 0:
        found = "missing" if value is None else f"is {value}"
        raise ValueError(f"{field}.{name}: {found}; write the positive number of training")
    return value
