"""Bytes that a draft model's own weights and KV take, from its config and tensor types alone."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from .block_tensors import CONFIDENCE, block_shapes
from .device_config import DTYPE_BYTES, Placement
from .draft_config import DraftConfig
from .draft_names import our_name
from .draft_source import DraftSource
from .model_sizes import kv_bytes_per_token, padded, runs_packed, weight_bytes
from .refusal import Refused
from .tensor_shapes import draft_shapes


class DraftSizes(NamedTuple):
    """Bytes of its weights in memory, and of its KV of a token."""

    weight_bytes: int
    kv_bytes_per_token: int


NO_DRAFT = DraftSizes(0, 0)


class _Matrix(NamedTuple):
    """[``outputs``, ``inputs``], of tensors of these ``names``; "": rows of the target's head.
    ``rounds``: it may be rounded to integers.
    """

    names: tuple[str, ...]
    outputs: int
    inputs: int
    rounds: bool = True


def draft_sizes(draft: DraftSource, placement: Placement) -> DraftSizes:
    """Both as the engine's classes count them: weights without what is the target's."""
    config, item = draft.config, DTYPE_BYTES[placement.dtype]
    if config.algorithm == "STANDALONE":
        weights = weight_bytes(config.model, draft.stored, placement)
    elif config.block is not None:
        weights = _block_bytes(config, item, placement.device == "cuda")
    elif runs_packed(config.model, placement):
        weights = _packed_bytes(draft)
    else:
        elements = sum(math.prod(shape) for shape in draft_shapes(config, ()).values())
        if config.hot_tokens and not config.owns_head:  # rows of the target's
            elements += config.draft_vocab_size * config.model.hidden_size
        weights = elements * item
    return DraftSizes(weights, kv_bytes_per_token(config.model, item))


def _block_bytes(config: DraftConfig, item: int, stacked: bool) -> int:
    """Columns of fc that take the same layer are one; the confidence head is float32.

    ``stacked``: injection has the key and value rows of all layers a second time.
    """
    shapes, model = block_shapes(config), config.model
    shapes["model.fc.weight"] = (model.hidden_size, config.feature_size)
    if stacked:
        shapes["stacked"] = (model.num_hidden_layers * 2 * model.kv_size, model.hidden_size)
    return sum(
        math.prod(shape) * (4 if name.startswith(CONFIDENCE) else item)
        for name, shape in shapes.items()
    )


def refuse_quantization(draft: DraftSource | None, placement: Placement) -> Refused | None:
    """Why the draft cannot be rounded to integers, if it is asked for and cannot be."""
    if draft is None or not draft.int8 or runs_packed(draft.config.model, placement):
        return None
    return Refused(
        "speculative_draft_model_quantization",
        "int8 is for the CPU's own kernels so far (--device cpu, a head_dim that is a multiple of "
        "8); leave it out",
        501,
    )


def _matrices(config: DraftConfig, int8: bool) -> Iterator[_Matrix]:
    """Of an EAGLE or EAGLE3 draft, gate and up padded as the CPU's kernels do; with ``int8`` the
    head is always its own.
    """
    model, three = config.model, config.algorithm == "EAGLE3"
    hidden, inner, q = model.hidden_size, model.intermediate_size, model.q_size
    for index in range(model.num_hidden_layers):
        at, mlp = f"layers.{index}.self_attn", f"layers.{index}.mlp"
        width = 2 * hidden if three and index == 0 else hidden  # the embedding beside the stream
        names = (f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj")
        yield _Matrix(names, q + 2 * model.kv_size, width)
        yield _Matrix((f"{at}.o_proj",), hidden, q)
        yield _Matrix((f"{mlp}.gate_proj", f"{mlp}.up_proj"), 2 * inner, hidden)
        yield _Matrix((f"{mlp}.down_proj",), hidden, inner)
    if config.has_fc:
        yield _Matrix(("fc",), hidden, config.feature_size + (0 if three else hidden), False)
    if config.owns_head or config.hot_tokens or int8:
        name = "lm_head" if config.owns_head else ""
        yield _Matrix((name,), config.draft_vocab_size, hidden)


def _table_elements(config: DraftConfig) -> int:
    return config.model.vocab_size * config.model.hidden_size if config.owns_embedding else 0


def _packed_bytes(draft: DraftSource) -> int:
    """Of the CPU kernels' matrices, and of an embedding table as it is stored."""
    config, default = draft.config, draft.config.model.torch_dtype
    stored = {our_name(name): dtype for name, dtype in draft.stored.items()}

    def item(names: tuple[str, ...]) -> int:
        tensors = [our_name(f"{name}.weight") for name in names if name]
        types = {stored.get(tensor, default) for tensor in tensors} or {draft.target_dtype}
        return 2 if types == {"bfloat16"} else 4

    total = _table_elements(config) * item(("embed_tokens",))
    for matrix in _matrices(config, draft.int8):
        outputs = padded(matrix.outputs)
        if len(matrix.names) == 2:  # gate and up, eight rows of each in turn
            outputs = 2 * padded(matrix.outputs // 2, 8)
        rounded = draft.int8 and matrix.rounds
        total += outputs * matrix.inputs * (1 if rounded else item(matrix.names))
    return total
