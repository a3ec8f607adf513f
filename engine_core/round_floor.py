"""The least that drafting adds to a step: what a draft model's forwards must read and compute."""

from .device_config import DTYPE_BYTES
from .draft_config import BlockConfig, DraftConfig, SpecShape
from .model_config import ModelConfig
from .model_sizes import kv_bytes_per_token
from .step_floor import StepWork


def draft_work(
    draft: DraftConfig, shape: SpecShape, dtype: str, rows: int, length: float
) -> StepWork:
    """A round of ``rows`` requests: the extend over a verify row's tokens, and a forward a step.

    EAGLE's first step reads its candidates from the extend, so that ``steps`` forwards read layers
    and head; STANDALONE's extend is one more, whose logits nobody needs. Features pass fc once a
    round in EAGLE3, with every token in EAGLE. A forward after the extend takes ``topk`` tokens a
    row. ``length``: mean tokens of a request, whose draft KV a forward reads once.

    A block draft runs once over its blocks and projects keys and values of a verify row's tokens.
    """
    if draft.block is not None:
        return _block_work(draft, draft.block, dtype, rows, length)
    model, steps = draft.model, shape.steps
    hidden = model.hidden_size
    extended, stepped = rows * shape.num_draft_tokens, rows * shape.topk
    layers = model.num_hidden_layers * (2 * model.q_size + 2 * model.kv_size) * hidden
    layers += model.num_hidden_layers * 3 * model.intermediate_size * hidden
    head = draft.draft_vocab_size * hidden
    fused = 0
    match draft.algorithm:
        case "STANDALONE":
            later = steps
        case "EAGLE":
            later = steps - 1
            layers += (hidden + draft.feature_size) * hidden  # fc, which every token passes
        case "EAGLE3":
            later = steps - 1
            layers += (model.q_size + 2 * model.kv_size) * hidden  # the embedding's part
            fused = draft.feature_size * hidden if draft.has_fc else 0
        case _:
            raise ValueError(f"{draft.algorithm}: its config has no block")
    item = DTYPE_BYTES[dtype]
    kv = _kv_bytes(model, item, rows, length)
    linear = extended * (layers + fused) + later * stepped * layers
    heads = (rows + (steps - 1) * stepped) * head
    return StepWork(
        weight_bytes=((1 + later) * layers + steps * head + fused) * item,
        kv_bytes=round((1 + later) * kv),
        operations=2 * (linear + heads),
    )


def _block_work(
    draft: DraftConfig, block: BlockConfig, dtype: str, rows: int, length: float
) -> StepWork:
    model, item = draft.model, DTYPE_BYTES[dtype]
    hidden, kv_size = model.hidden_size, 2 * model.kv_size
    tokens, verified, drafted = rows * block.rows, rows * (block.drafts + 1), rows * block.drafts
    layer = (2 * model.q_size + kv_size + 3 * model.intermediate_size) * hidden
    layers, written = model.num_hidden_layers * layer, model.num_hidden_layers * kv_size * hidden
    head = draft.draft_vocab_size * hidden
    fused = draft.feature_size * hidden
    bias = 0  # the Markov head's second table, which a draft's tokens pass one after the other
    if block.markov is not None:
        bias = draft.draft_vocab_size * block.markov.rank
    return StepWork(
        weight_bytes=(layers + written + head + fused + block.drafts * bias) * item,
        kv_bytes=round(_kv_bytes(model, item, rows, length)),
        operations=2 * (tokens * layers + verified * (written + fused) + drafted * (head + bias)),
    )


def _kv_bytes(model: ModelConfig, item: int, rows: int, length: float) -> float:
    """Of one forward over requests of so many tokens."""
    seen = sum(min(length, window) if window else length for window in model.sliding_windows)
    return rows * seen * kv_bytes_per_token(model, item) / model.num_hidden_layers
