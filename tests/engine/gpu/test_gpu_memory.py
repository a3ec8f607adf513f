"""What is planned against what is allocated: a forward pass's storages, and an engine on a GPU."""

# mypy: disable-error-code="no-untyped-call"

import gc
from typing import Any

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine.build import build_engine
from outrider.engine.kv_pool import KVPool
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.weights import RandomTensors
from outrider.engine_core.config import EngineConfig
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


@pytest.mark.gpu
def test_timed_matmuls_share_the_memory_of_their_graphs() -> None:
    from outrider.engine.gemm_table import GemmKey
    from outrider.engine.gemm_timer import GemmTimer

    shape = (4096, 4096)
    weights = [torch.randn(shape, device=DEVICE).bfloat16() for _ in range(4)]
    timer = GemmTimer([[("none", weight)] for weight in weights])
    with torch.inference_mode():
        timer(GemmKey(*shape, 128, "bfloat16"), None, {})
        before = torch.cuda.memory_reserved(DEVICE)
        for tier in (16, 32, 64, 128) * 2:
            timer(GemmKey(*shape, tier, "bfloat16"), None, {})
    assert torch.cuda.memory_reserved(DEVICE) - before <= 4 << 20


@pytest.mark.gpu
def test_an_engine_takes_what_was_planned() -> None:
    engine = build_engine(EngineConfig(model="pycoder", device="cuda", max_running_requests=8))
    try:
        report = engine.memory.report()
    finally:
        engine.shutdown()
    assert report is not None
    stages = {stage.stage: stage for stage in report.stages}
    assert list(stages) == ["context", "weights", "pool", "state", "ready"]
    plan = report.plan
    weights = stages["weights"].allocated_bytes - stages["context"].allocated_bytes
    assert weights - plan.weight_bytes - plan.state_bytes < 4 << 20
    pool = stages["pool"].allocated_bytes - stages["weights"].allocated_bytes
    assert 0 <= pool - plan.kv_bytes <= 512
