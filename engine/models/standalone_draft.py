"""A small language model of its own as a draft."""

from collections.abc import Iterable

import torch

from ...engine_core.draft_config import DraftConfig
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from .draft_net import DraftHidden
from .model import GpuModel, Model


class StandaloneDraft:
    """Any model as a DraftNet: it takes tokens alone, and knows nothing of the target."""

    def __init__(self, config: DraftConfig, model: Model) -> None:
        self._config = config
        self._model = model

    @property
    def config(self) -> DraftConfig:
        """What it is."""
        return self._config

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory."""
        return self._model.weight_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype."""
        return self._model.dtype

    @property
    def token_ids(self) -> None:
        """Its vocabulary is the target's."""
        return None

    @property
    def model(self) -> Model:
        """The model itself."""
        return self._model

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """``features`` themselves, of which there are none."""
        return features

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None, kv: KVPool) -> DraftHidden:
        """Run ``batch``; ``hidden`` is not looked at."""
        out = self._model.forward(batch, kv)
        return DraftHidden(out, out)

    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """float32[N, V] logits of rows [N, H]."""
        return self._model.logits(head_input)


class GpuStandaloneDraft(StandaloneDraft):
    """A model whose passes can be captured."""

    def __init__(self, config: DraftConfig, model: GpuModel) -> None:
        super().__init__(config, model)
        self._gpu_model = model

    def tune(self, rows: Iterable[int]) -> None:
        """Choose the matmuls of passes of these numbers of tokens."""
        self._gpu_model.tune(rows)

    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of rows [N, H] in the computation dtype."""
        return self._gpu_model.raw_logits(head_input)
