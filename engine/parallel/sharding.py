"""A rank's share of every tensor, cut when it is read."""

import torch

from ...engine_core.model_config import ModelConfig
from ..weights import WholeTensors

_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # each rank has some outputs
_INPUTS = ("o_proj", "down_proj")  # each rank has some inputs; the outputs are summed
_HEAD = "lm_head.weight"


class ShardedTensors:
    """What rank ``rank`` of ``size`` takes from ``source``, which holds the whole ``model``.

    Loaders ask for the shapes of ``shard_model``'s config. Query, key, value, gate and up are cut
    by outputs, with their biases; o and down by inputs, and their bias, which must be added once,
    is zero but on rank 0. Embedding and norms are whole on every rank. An output head of its own
    is rank 0's alone, which needs all logits to decide tokens: elsewhere it has no rows.
    """

    def __init__(self, source: WholeTensors, model: ModelConfig, rank: int, size: int) -> None:
        self._source = source
        self._model = model
        self._rank = rank
        self._size = size

    def has(self, name: str) -> bool:
        """Whether the whole model has ``name``."""
        return self._source.has(name)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The rank's part, of ``shape``, of tensor ``name``."""
        *_, module, kind = ("", *name.split("."))
        if module in _OUTPUTS:
            begin, whole = self._outputs(module, shape[0])
            return self._source.part(name, (whole, *shape[1:]), 0, begin, shape[0])
        if module in _INPUTS and kind == "weight":
            whole = shape[1] * self._size
            return self._source.part(name, (shape[0], whole), 1, self._rank * shape[1], shape[1])
        tensor = self._source.take(name, shape)
        if self._rank and module in _INPUTS:
            return torch.zeros_like(tensor)
        if self._rank and name == _HEAD and not self._model.tie_word_embeddings:
            return tensor.new_empty(0, shape[1])
        return tensor

    def _outputs(self, module: str, share: int) -> tuple[int, int]:
        """First row of the rank's ``share``, and the rows of the whole."""
        model = self._model
        if module in ("k_proj", "v_proj"):
            # With more ranks than heads, neighbours hold the same head.
            first = self._rank * model.num_key_value_heads // self._size
            return first * model.head_dim, model.kv_size
        return self._rank * share, share * self._size
