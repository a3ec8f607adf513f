"""The least time that a step can take: what it must read and compute, at measured rates."""

from typing import NamedTuple

from .device_config import DTYPE_BYTES
from .model_config import ModelConfig


class Rates(NamedTuple):
    """What the machine does. ``copy``: bytes read and written a second; ``matmul``: operations."""

    copy: float
    matmul: float


class StepWork(NamedTuple):
    """What a step cannot avoid: bytes of weights and of KV to read, operations to compute."""

    weight_bytes: int
    kv_bytes: int
    operations: int

    def with_drafts(self, drafts: "StepWork") -> "StepWork":
        """Of a round: the verify step and what drafting adds to it."""
        return StepWork(
            self.weight_bytes + drafts.weight_bytes,
            self.kv_bytes + drafts.kv_bytes,
            self.operations + drafts.operations,
        )

    def floor(self, rates: Rates) -> float:
        """Seconds: the slower of weights and operations, and then the KV."""
        weights = max(self.weight_bytes / rates.copy, self.operations / rates.matmul)
        return weights + self.kv_bytes / rates.copy


class PrefillOperations(NamedTuple):
    """Operations of whole prompts: of the matrices, and of attention over what each token sees."""

    linear: int
    attention: int

    @property
    def total(self) -> int:
        """Both."""
        return self.linear + self.attention


def step_work(
    model: ModelConfig,
    streamed_bytes: int,
    kv_bytes_per_token: int,
    rows: int,
    tokens: int,
    length: float,
) -> StepWork:
    """A decode-only step of ``rows`` requests and ``tokens`` query tokens, logits for each.

    ``length``: mean tokens of a request whose KV is read, once for all query tokens of its row. A
    layer with a sliding window reads no more than the window.
    """
    layers = model.num_hidden_layers
    seen = sum(min(length, window) if window else length for window in model.sliding_windows)
    return StepWork(
        weight_bytes=streamed_bytes,
        kv_bytes=round(rows * seen * kv_bytes_per_token / layers),
        operations=2 * tokens * matmul_elements(model),
    )


def prefill_operations(model: ModelConfig, prompts: int, length: int) -> PrefillOperations:
    """The prefill of ``prompts`` of ``length`` tokens each, with logits of their last ones.

    A multiplication and an addition count as two. A token's queries meet it and the tokens before
    it (in a layer with a sliding window, those inside): products with keys, and with values.
    """
    head = model.vocab_size * model.hidden_size
    matrices = matmul_elements(model) - head
    seen = 0
    for window in model.sliding_windows:
        full = min(length, window) if window else length
        seen += full * (full + 1) // 2 + (length - full) * full
    return PrefillOperations(
        linear=2 * prompts * (length * matrices + head),
        attention=4 * prompts * seen * model.q_size,
    )


def matmul_elements(model: ModelConfig) -> int:
    """Elements of the matrices that every token is multiplied with, the output head's included."""
    hidden, inner = model.hidden_size, model.intermediate_size
    layer = (2 * model.q_size + 2 * model.kv_size + 3 * inner) * hidden
    return model.num_hidden_layers * layer + model.vocab_size * hidden


def streamed_bytes(model: ModelConfig, weight_bytes: int, device: str, dtype: str) -> int:
    """Of ``weight_bytes``, those that a step reads whole: all but an embedding table of its own.

    A table that is the output head too is read by the head.
    """
    if model.tie_word_embeddings:
        return weight_bytes
    item = DTYPE_BYTES[dtype]
    if device == "cpu" and model.torch_dtype == "bfloat16" and model.head_dim % 8 == 0:
        item = 2  # the CPU kernels keep such weights as they are
    return weight_bytes - model.vocab_size * model.hidden_size * item
