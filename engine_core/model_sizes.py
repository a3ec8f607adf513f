"""Bytes that a model's weights and KV take in memory, from config.json and tensor types alone."""

import math
from collections.abc import Mapping

from .device_config import DTYPE_BYTES, Placement
from .model_config import ModelConfig
from .tensor_shapes import decoder_shapes


def kv_bytes_per_token(model: ModelConfig, item: int) -> int:
    """KV bytes of one token over all layers; ``item``: bytes of an element."""
    return 2 * model.num_hidden_layers * model.kv_size * item


def weight_bytes(
    model: ModelConfig, stored: Mapping[str, str], placement: Placement, packed: bool = True
) -> int:
    """Bytes of the weights in memory, as the engine's model classes count them.

    ``packed``: a CPU runs its own kernels where it can, as it does with one rank.
    """
    if packed and runs_packed(model, placement):
        return _packed_bytes(model, stored)
    return _elements(model) * DTYPE_BYTES[placement.dtype]


def _elements(model: ModelConfig) -> int:
    """Elements of all tensors, a tied head counted once."""
    return sum(math.prod(shape) for shape in decoder_shapes(model).values())


def _packed_bytes(model: ModelConfig, stored: Mapping[str, str]) -> int:
    """Of the CPU kernels' matrices: outputs padded to 16, gate/up pairs to 8 of each.

    bfloat16 stays bfloat16; what is stored otherwise becomes float32.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.q_size, model.kv_size

    def item(*names: str) -> int:
        default = model.torch_dtype
        return 2 if all(stored.get(f"{n}.weight", default) == "bfloat16" for n in names) else 4

    total = 0
    for index in range(model.num_hidden_layers):
        at, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        qkv = item(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj")
        total += padded(q + 2 * kv) * hidden * qkv
        total += padded(hidden) * q * item(f"{at}.o_proj")
        gate_up = item(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        total += -(-inner // 8) * 16 * hidden * gate_up
        total += padded(hidden) * inner * item(f"{mlp}.down_proj")
    embed = item("model.embed_tokens")
    if model.tie_word_embeddings:
        return total + padded(model.vocab_size) * hidden * embed
    head = padded(model.vocab_size) * hidden * item("lm_head")
    return total + head + model.vocab_size * hidden * embed


def padded(outputs: int, to: int = 16) -> int:
    """``outputs`` rounded up, as the CPU's kernels pad a matrix."""
    return -(-outputs // to) * to


def runs_packed(model: ModelConfig, placement: Placement) -> bool:
    """Whether the CPU's own kernels run a whole model."""
    return placement.device == "cpu" and model.head_dim % 8 == 0
