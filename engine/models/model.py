"""What the engine asks of a target model."""

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import torch

from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool

# Sums a tensor over the ranks of a tensor-parallel model, in place; returns it.
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Model(Protocol):
    """A causal language model over paged KV. T, N, H, V: tokens, rows, hidden size, vocabulary."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory; a matmul pass streams about that much."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype, which is also that of the KV pool."""
        ...

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Hidden states [T, H] after the final norm; writes this step's keys and values."""
        ...

    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward``, and the streams entering A captured layers, side by side [T, A * H].

        Layer indices are 0..num_hidden_layers ascending; the last is the stream after all layers.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of hidden rows [N, H] that ``forward`` returned."""
        ...


class TargetModel(Model, Protocol):
    """A model that drafts can share tables with."""

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding table [V, H], in the weights' own dtype."""
        ...

    @property
    def output_head(self) -> torch.Tensor:
        """The output head [V, H], in the weights' own dtype."""
        ...


@runtime_checkable
class GpuModel(Model, Protocol):
    """A model whose forward pass never waits for the device, so that it can be captured."""

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden rows [N, H] in the computation dtype."""
        ...

    def tune(self, rows: Iterable[int]) -> None:
        """Choose the matmuls of passes of these numbers of tokens; before graphs are captured.

        What has to be measured is kept on disk for the next start.
        """
        ...
