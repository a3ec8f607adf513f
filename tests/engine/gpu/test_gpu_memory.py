"""The planned activations are what a forward pass holds at its peak, by the storages it makes."""

import gc
from typing import Any

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine.kv_pool import KVPool
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.weights import RandomTensors
from outrider.engine_core.memory_parts import StepSize, activation_bytes
from outrider.engine_core.model_config import ModelConfig

from ..steps import Pages, Query, Sequence, make_batch
from ..tiny import bigram_config
from .gpu_driver import DEVICE

TOKENS, LAYERS = 16, 2


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside it that are still alive; keeps the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(out):
            if storage._cdata not in given:  # else a view, or changed in place
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._bytes() > self.peak:
            gc.collect()  # Triton's interpreter leaves cycles behind that hold tensors
            self.peak = max(self.peak, self._bytes())
        return out

    def _bytes(self) -> int:
        self._live = {k: held for k, held in self._live.items() if not held[0].expired()}
        return sum(size for _, size in self._live.values())


def storages(tree: object) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def shaped(**sizes: int) -> ModelConfig:
    return msgspec.structs.replace(
        bigram_config(32),
        num_hidden_layers=LAYERS,
        sliding_windows=(0,) * LAYERS,
        context_length=64,
        head_dim=16,
        **sizes,
    )


@pytest.mark.parametrize(
    "config",
    [
        shaped(hidden_size=32, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2),
        shaped(hidden_size=32, intermediate_size=16, num_attention_heads=8, num_key_value_heads=4),
    ],
    ids=["wide mlp", "wide attention"],
)
def test_a_forward_pass_holds_what_is_planned(config: ModelConfig) -> None:
    model = GpuDecoder(RandomTensors(torch.float32, DEVICE), config, torch.float32, DEVICE)
    kv = KVPool(8, 16, config, torch.float32, DEVICE)
    with DEVICE:
        pages = Pages(8, 16, 0)
        batch = make_batch([Query(Sequence(), list(range(TOKENS // 2)) * 2)], pages)
    with LiveBytes() as live:
        hidden = model.forward(batch, kv)
        model.raw_logits(hidden[-1:])
    planned = activation_bytes(config, StepSize(TOKENS, 1), 4, False)
    assert live.peak == planned
