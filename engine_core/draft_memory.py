"""What a draft model adds to the memory that its target takes, part by part.

It follows the allocations of ``engine/models/gpu_draft.py`` and ``engine/speculative``: a change
there belongs here too. A draft runs behind its target in the same step, so that its tensors find
the target's blocks; what counts is what it needs beyond them.
"""

from typing import NamedTuple

import msgspec

from .config import EngineConfig
from .device_config import DTYPE_BYTES, Placement
from .draft_config import BlockConfig, DraftConfig
from .draft_source import DraftSource
from .draft_window import view_pages, window_pool
from .graph_sizes import CHUNK_ROWS, graph_rows
from .memory_parts import (
    JUDGED_KERNELS,
    OVERRUN_TOKENS,
    StepSize,
    activation_bytes,
    graph_size,
    record_bytes,
    rotary_bytes,
    slots,
    step_bytes,
)
from .model_config import ModelConfig

# A layer's; what the extend has beside them, and a pass over chains or trees: layout, input, head,
# candidates, what is gathered, grown and kept.
_LAYER_KERNELS, _EXTEND_KERNELS, _CHAIN_KERNELS, _TREE_KERNELS = 10, 16, 6, 20
# Of a block draft: layout, input, head and injection (two for each layer), and for each token what
# the Markov head adds.
_BLOCK_KERNELS, _MARKOV_KERNELS = 16, 6
_DRAWN_KERNELS = 10  # a draft's own, where it is drawn
_LAWS = 5  # float32 of a node and token that a CPU's acceptance has at a time
_WINDOW_KERNELS = 4  # changes, views' beginnings, views, and where injection writes


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
    extra += _drawn_bytes(config, draft, target, rows, item, on_cuda)
    width = draft.shape.num_draft_tokens
    pool = window_pool(config, context, config.page_size, width)
    if pool is not None:  # the views' page-table rows
        extra += 4 * rows * view_pages(pool.window, config.page_size, width)
    records = _record_bytes(config, draft) if on_cuda and not config.disable_cuda_graph else 0
    return DraftParts(
        activation_bytes=beyond + extra,
        graph_bytes=records and records + _pool_bytes(config, draft, target, item),
        state_bytes=_state_bytes(config, draft, context, item),
        edit_bytes=records,  # graphs of their own
    )


def _pool_bytes(config: EngineConfig, draft: DraftSource, target: ModelConfig, item: int) -> int:
    rows = graph_rows(config) + CHUNK_ROWS
    size = graph_size(config, draft.shape.num_draft_tokens)
    own = step_bytes(_as_decoder(draft), _draft_size(draft, size, rows), item)
    beyond = max(0, own - step_bytes(target, size, item))
    drawn = _drawn_bytes(config, draft, target, graph_rows(config), item, on_cuda=True)
    return beyond + _extra_bytes(draft, size, rows, item) + drawn


def _record_bytes(config: EngineConfig, draft: DraftSource) -> int:
    """The driver's records of what drafting adds to all graphs."""
    layers = _LAYER_KERNELS * draft.config.model.num_hidden_layers
    block = draft.config.block
    if block is not None:
        each = _MARKOV_KERNELS if block.markov is not None else 0
        layers += 0 if config.speculative_draft_window_size is None else _WINDOW_KERNELS
        kernels = (
            layers + _BLOCK_KERNELS + 2 * draft.config.model.num_hidden_layers + block.drafts * each
        )
        return record_bytes(config, kernels, draft.shape.num_draft_tokens)
    # EAGLE's first level comes from the extend, STANDALONE's takes a pass.
    passes = draft.shape.steps - (draft.config.algorithm != "STANDALONE")
    each = _CHAIN_KERNELS if draft.shape.topk == 1 else _TREE_KERNELS
    kernels = layers + _EXTEND_KERNELS + passes * (layers + each)
    if config.draws_drafts:
        kernels += draft.shape.steps * _DRAWN_KERNELS + JUDGED_KERNELS
    return record_bytes(config, kernels, draft.shape.num_draft_tokens)


def _state_bytes(config: EngineConfig, draft: DraftSource, context: int, item: int) -> int:
    """The rotary table of the draft, and by slot what its drafter keeps: the newest token, or
    level 1 (where drafts are drawn, its head's input), its recurrent hidden state and the prompt.
    """
    model = draft.config.model
    slot = 8
    if draft.config.algorithm != "STANDALONE" and draft.config.block is None:
        pages = -(-(context + OVERRUN_TOKENS) // config.page_size)
        slot = 4 * pages * config.page_size + model.hidden_size * item + 12 * draft.shape.topk
        slot += model.hidden_size * item * config.draws_drafts
    return slots(config) * slot + rotary_bytes(model)


def _as_decoder(draft: DraftSource) -> ModelConfig:
    return msgspec.structs.replace(draft.config.model, vocab_size=draft.config.draft_vocab_size)


def _draft_size(draft: DraftSource, size: StepSize, rows: int) -> StepSize:
    """The larger of the extend over a step's tokens and the last level of a tree; of block drafts
    their blocks."""
    block = draft.config.block
    if block is not None:
        return StepSize(rows * block.rows, rows * block.drafts)
    steps, topk = draft.shape.steps, draft.shape.topk
    return StepSize(max(size.tokens, rows * topk * max(1, steps - 1)), rows * topk)


def _extra_bytes(draft: DraftSource, size: StepSize, rows: int, item: int) -> int:
    """The target's features; hidden state, beside the embedding too, of every token; of trees
    their nodes' hidden states, gathered for a pass, and probabilities of a level's nodes."""
    config, topk = draft.config, draft.shape.topk
    hidden = config.model.hidden_size
    if config.block is not None:
        return _injected_bytes(config, config.block, size.tokens, rows, item)
    # Without layers of its own choice the feature is the final hidden state, which is there.
    features = config.feature_size if config.feature_layers else 0
    inputs = 0 if config.algorithm == "STANDALONE" else 3 * hidden
    total = size.tokens * (features + inputs) * item
    if topk > 1:
        total += rows * topk * config.draft_vocab_size * 4
        total += 2 * rows * topk * max(1, draft.shape.steps - 1) * hidden * item
    return total


def _injected_bytes(
    config: DraftConfig, block: BlockConfig, tokens: int, rows: int, item: int
) -> int:
    """The target's features of a step's tokens, the context vector before and behind its norm, and
    all layers' keys and values; of the blocks the hidden states that propose, and the Markov head's
    logits of a step, latents and share of the hidden states."""
    model = config.model
    written = 2 * model.hidden_size + 2 * model.num_hidden_layers * model.kv_size
    total = tokens * (config.feature_size + written) * item
    total += rows * block.drafts * model.hidden_size * item
    if block.markov is not None:
        total += rows * (model.vocab_size + 3 * (block.drafts + 2) * block.markov.rank) * item
    return total


def _drawn_bytes(
    config: EngineConfig,
    draft: DraftSource,
    target: ModelConfig,
    rows: int,
    item: int,
    on_cuda: bool,
) -> int:
    """Where drafts are drawn, the logits that they came from, kept until acceptance."""
    if not config.draws_drafts:
        return 0
    drafts, known = rows * draft.shape.steps, draft.config.draft_vocab_size
    if on_cuda:
        return drafts * known * item + rows * known * 4  # a level's in float32
    return drafts * known * 4 + drafts * target.vocab_size * 4 * _LAWS
