"""The least that drafting adds to a step: what a draft model's forwards must read and compute."""

from .device_config import DTYPE_BYTES
from .draft_config import DraftConfig, SpecShape
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
    """
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
    item = DTYPE_BYTES[dtype]
    seen = sum(min(length, window) if window else length for window in model.sliding_windows)
    kv = rows * seen * kv_bytes_per_token(model, item) / model.num_hidden_layers
    linear = extended * (layers + fused) + later * stepped * layers
    heads = (rows + (steps - 1) * stepped) * head
    return StepWork(
        weight_bytes=((1 + later) * layers + steps * head + fused) * item,
        kv_bytes=round((1 + later) * kv),
        operations=2 * (linear + heads),
    )
