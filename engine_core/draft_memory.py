"""What a draft model adds to the memory that its target takes, part by part.

It follows the allocations of ``engine/models/gpu_draft.py`` and ``engine/speculative``: a change
there belongs here too. A draft runs behind its target in the same step, so that its tensors find
the target's blocks; what counts is what it needs beyond them.
"""

from typing import NamedTuple

import msgspec

from .config import EngineConfig
from .device_config import DTYPE_BYTES, Placement
from .draft_config import DraftConfig
from .draft_source import DraftSource
from .memory_parts import (
    OVERRUN_TOKENS,
    StepSize,
    activation_bytes,
    graph_rows,
    record_bytes,
    rotary_bytes,
    slots,
    step_bytes,
)
from .model_config import ModelConfig
from .model_sizes import kv_bytes_per_token, weight_bytes

_SLOT_BYTES = 64  # of a slot: lengths and its position among the drafts
_LAYER_KERNELS, _FORWARD_KERNELS = 10, 20  # of a forward: a layer's; embedding, fc, head, choice


class DraftSizes(NamedTuple):
    """Bytes of its weights in memory, and of its KV of a token."""

    weight_bytes: int
    kv_bytes_per_token: int


NO_DRAFT = DraftSizes(0, 0)


def draft_sizes(draft: DraftSource, placement: Placement) -> DraftSizes:
    """What is exact: weights of its own, and KV beside the target's."""
    item = DTYPE_BYTES[placement.dtype]
    config = draft.config
    if config.algorithm == "STANDALONE":
        weights = weight_bytes(config.model, draft.stored, placement)
    else:
        weights = _elements(config) * item
    return DraftSizes(weights, kv_bytes_per_token(config.model, item))


class DraftParts(NamedTuple):
    """Bytes beyond the target's parts of the same names."""

    activation_bytes: int
    graph_bytes: int
    state_bytes: int
    edit_bytes: int


NO_PARTS = DraftParts(0, 0, 0, 0)


def draft_parts(
    config: EngineConfig,
    draft: DraftSource,
    target: ModelConfig,
    size: StepSize,
    context: int,
    placement: Placement,
) -> DraftParts:
    """Beside a target whose steps are up to ``size``, and whose requests up to ``context``."""
    item, on_cuda = DTYPE_BYTES[placement.dtype], placement.device == "cuda"
    rows = config.max_running_requests
    own = activation_bytes(_as_decoder(draft), _draft_size(draft, size, rows), item, on_cuda)
    beyond = max(0, own - activation_bytes(target, size, item, on_cuda))
    extra = (2 if on_cuda else 1) * _extra_bytes(draft, size, rows, item)
    records = _record_bytes(config, draft) if on_cuda and not config.disable_cuda_graph else 0
    return DraftParts(
        activation_bytes=beyond + extra,
        graph_bytes=records and records + _pool_bytes(config, draft, target, item),
        state_bytes=_state_bytes(config, draft, context, item),
        edit_bytes=records,  # graphs of their own
    )


def _pool_bytes(config: EngineConfig, draft: DraftSource, target: ModelConfig, item: int) -> int:
    rows, width = graph_rows(config), draft.shape.num_draft_tokens
    size = StepSize(rows * width, rows * width)
    own = step_bytes(_as_decoder(draft), _draft_size(draft, size, rows), item)
    beyond = max(0, own - step_bytes(target, size, item))
    return beyond + _extra_bytes(draft, size, rows, item)


def _record_bytes(config: EngineConfig, draft: DraftSource) -> int:
    """The driver's records of what drafting adds to all graphs."""
    # The extend, and a forward for each step but the first; STANDALONE's feeds the bonus token.
    forwards = draft.shape.steps + (draft.config.algorithm == "STANDALONE")
    kernels = _LAYER_KERNELS * draft.config.model.num_hidden_layers + _FORWARD_KERNELS
    return record_bytes(forwards * kernels, graph_rows(config), draft.shape.num_draft_tokens)


def _state_bytes(config: EngineConfig, draft: DraftSource, context: int, item: int) -> int:
    """The slots' candidates, recurrent hidden states and prompts, and the draft's rotary table."""
    model = draft.config.model
    pages = -(-(context + OVERRUN_TOKENS) // config.page_size)
    text = 4 * pages * config.page_size
    hidden = model.hidden_size * item
    slot = text + hidden + 8 * draft.shape.topk + _SLOT_BYTES
    return slots(config) * slot + rotary_bytes(model)


def _elements(config: DraftConfig) -> int:
    """Elements of the tensors of an EAGLE or EAGLE3 draft, without those that are the target's."""
    model, three = config.model, config.algorithm == "EAGLE3"
    hidden, inner, q, kv = model.hidden_size, model.intermediate_size, model.q_size, model.kv_size
    layer = (q + 2 * kv) * hidden + hidden * q + 3 * inner * hidden + 2 * hidden
    layer += 2 * model.head_dim if model.qk_norm else 0
    layer += q + 2 * kv if model.qkv_bias else 0
    layer += hidden if model.o_bias else 0
    layer += 2 * inner + hidden if model.mlp_bias else 0
    total = model.num_hidden_layers * layer
    if three:
        total += (q + 2 * kv) * hidden + hidden  # layer 0 takes in the embedding too
        total += config.feature_size * hidden + hidden  # fc, the final norm
    else:
        total += (hidden + config.feature_size) * hidden
        total -= 0 if config.first_layer_norm else hidden
    total += hidden if config.fc_bias else 0
    total += config.feature_size if config.norm_before_fc else 0
    total += config.feature_size if config.chunk_norms else 0
    total += model.vocab_size * hidden if config.owns_embedding else 0
    total += config.draft_vocab_size * hidden if config.owns_head or config.hot_tokens else 0
    return total


def _as_decoder(draft: DraftSource) -> ModelConfig:
    return msgspec.structs.replace(draft.config.model, vocab_size=draft.config.draft_vocab_size)


def _draft_size(draft: DraftSource, size: StepSize, rows: int) -> StepSize:
    """The larger of the extend over a step's tokens and the last level of a tree."""
    steps, topk = draft.shape.steps, draft.shape.topk
    return StepSize(max(size.tokens, rows * topk * max(1, steps - 1)), rows * topk)


def _extra_bytes(draft: DraftSource, size: StepSize, rows: int, item: int) -> int:
    """The target's features, what they and the embedding become together, and probabilities."""
    config, topk = draft.config, draft.shape.topk
    hidden = config.model.hidden_size
    inputs = 0 if config.algorithm == "STANDALONE" else 3 * hidden
    if config.algorithm == "EAGLE":
        inputs += config.feature_size  # beside the embedding, before fc
    candidates = rows * topk * config.draft_vocab_size * 4 if topk > 1 else 0
    return size.tokens * (config.feature_size + inputs) * item + candidates
