"""What one rank of a tensor-parallel model holds: its share of heads and of the MLP's width."""

import msgspec

from .model_config import ModelConfig
from .refusal import Refused

MAX_TP_SIZE = 64


def shard_model(model: ModelConfig, tp_size: int) -> ModelConfig | Refused:
    """The model as one rank of ``tp_size`` sees it; ``model`` itself for 1.

    A rank has 1/tp of the query heads and of the MLP's inner width, and 1/tp of the key/value
    heads, or one of them where there are more ranks than heads (it is then the same one on
    several ranks). What a token is made of (hidden size, vocabulary) stays whole.
    """
    if tp_size == 1:
        return model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    inner = model.intermediate_size
    if heads % tp_size:
        return _refused(tp_size, f"does not divide the model's {heads} attention heads")
    if kv_heads % tp_size and tp_size % kv_heads:
        reason = f"neither divides the model's {kv_heads} key/value heads nor is a multiple of them"
        return _refused(tp_size, reason)
    if inner % tp_size:
        return _refused(tp_size, f"does not divide the model's intermediate size {inner}")
    return msgspec.structs.replace(
        model,
        num_attention_heads=heads // tp_size,
        num_key_value_heads=max(1, kv_heads // tp_size),
        intermediate_size=inner // tp_size,
    )


def refuse_devices(tp_size: int, found: int) -> Refused | None:
    """Refuse more ranks than there are GPUs."""
    if tp_size <= found:
        return None
    return _refused(tp_size, f"needs as many CUDA devices, and torch finds {found}")


def _refused(tp_size: int, reason: str) -> Refused:
    return Refused("tp_size", f"{tp_size}: {reason}; choose another number of ranks, or 1")
