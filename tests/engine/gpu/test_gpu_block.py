"""Block drafts' networks on Triton kernels against the equations."""

import pytest
import torch

from outrider.engine.forward_batch import ForwardBatch, RowGroup
from outrider.engine.gemm_table import Epilogue, GemmKey
from outrider.engine.kv_pool import KVPool
from outrider.engine.models.block_net import GpuBlockNet
from outrider.engine.models.draft_net import GpuDraftNet
from outrider.engine.models.gpu_block import GpuBlock
from outrider.engine.models.torch_block import TorchBlock
from outrider.engine_core.draft_config import DraftConfig
from outrider.kernels.linear_config import SkinnyConfig

from ...reference.block_draft import BlockReference
from ..block_nets import (
    CONFIGS,
    CPU,
    HIDDEN,
    VOCAB,
    Tables,
    check_choice,
    ragged,
    random_tensors,
    reference_of,
    run_blocks,
    weights_of,
)
from .gpu_driver import DEVICE

SMALL = SkinnyConfig(32, 16, warps=1, stages=1)
SHAPES: dict[tuple[int, int], Epilogue] = {
    (16, 48): "none",
    (32, 16): "none",
    (64, 16): "none",
    (VOCAB, 16): "none",
    (VOCAB, 6): "none",
    (16, 16): "residual",
    (48, 16): "silu_mul",
    (16, 24): "residual",
}


def made(config: DraftConfig, dtype: torch.dtype) -> tuple[GpuBlock, BlockReference]:
    tensors = random_tensors(config)
    net = GpuBlock(weights_of(config, tensors), config, Tables(dtype, DEVICE), dtype, DEVICE)
    return net, reference_of(config, tensors, Tables())


# The interpreter takes long, and these add little to the others.
ON_A_GPU = ("full", "wide windows", "confident", "one draft", "vanilla")
NAMES = [
    pytest.param(name, marks=[pytest.mark.gpu] if name in ON_A_GPU else []) for name in CONFIGS
]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_those_of_the_equations(name: str) -> None:
    config = CONFIGS[name]
    net, reference = made(config, torch.float32)
    assert isinstance(net, GpuBlockNet)
    assert not isinstance(net, GpuDraftNet)
    passed = run_blocks(net, reference, ragged(config), DEVICE)
    for hidden, wanted in zip(passed.hidden, passed.wanted, strict=True):
        torch.testing.assert_close(hidden.double(), wanted.double(), atol=1e-4, rtol=1e-4)
    for injected, context in zip(passed.injected, passed.contexts, strict=True):
        for layer, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
            torch.testing.assert_close(injected[layer, 0].double(), key, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(injected[layer, 1].double(), value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_those_of_the_equations(name: str) -> None:
    net, reference = made(CONFIGS[name], torch.float32)
    check_choice(net, reference, DEVICE, 1e-5)


@pytest.mark.parametrize("name", ["gated", "rnn"])
def test_the_streaming_matmuls_serve_a_block(name: str) -> None:
    config = CONFIGS[name]
    net, reference = made(config, torch.bfloat16)
    net.choose_matmuls(
        {
            GemmKey(n, k, tier, "bfloat16", epilogue): SMALL
            for (n, k), epilogue in SHAPES.items()
            for tier in (16, 32)
        }
    )
    passed = run_blocks(net, reference, ragged(config), DEVICE)
    for hidden, wanted in zip(passed.hidden, passed.wanted, strict=True):
        assert (hidden - wanted).norm() <= 0.08 * wanted.norm()


def test_bytes_count_the_copies_for_injection() -> None:
    for name in ("mixed", "gated", "rnn"):
        config, model = CONFIGS[name], CONFIGS[name].model
        net, _ = made(config, torch.float32)
        plain = TorchBlock(
            weights_of(config, random_tensors(config)), config, Tables(), torch.float32, CPU
        )
        copies = 4 * model.num_hidden_layers * 2 * model.kv_size * model.hidden_size
        assert net.weight_bytes == plain.weight_bytes + copies


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixed", "whole-block windows", "narrow windows", "rnn"])
def test_captured_passes_give_the_bits_of_lone_launches(name: str) -> None:
    """Injection, a block and its choice, replayed between writes of their input."""
    assert DEVICE.type == "cuda"
    config, dtype = CONFIGS[name], torch.bfloat16
    assert config.block is not None
    block = config.block
    net, _ = made(config, dtype)
    net.tune([1, 4, 8])
    rows, size = 2, 4
    kv = KVPool(32, size, config.model, dtype, DEVICE)
    width = config.feature_size
    features = torch.zeros(8, width, dtype=dtype, device=DEVICE)
    ids = torch.zeros(rows * block.rows, dtype=torch.int64, device=DEVICE)
    bonus = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    tokens = torch.zeros(block.drafts, rows, dtype=torch.int64, device=DEVICE)

    def index(values: list[int], kind: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=DEVICE)

    table = torch.arange(1, 33, dtype=torch.int32, device=DEVICE).view(rows, 16)
    places = [(r * 16 + 1) * size + p for r in range(rows) for p in range(4, 4 + block.rows)]
    batch = ForwardBatch(
        input_ids=ids,
        positions=index([p for _ in range(rows) for p in range(4, 4 + block.rows)]),
        kv_slots=index(places),
        cu_q=index([r * block.rows for r in range(rows + 1)], torch.int32),
        kv_lens=index([4 + block.rows] * rows, torch.int32),
        page_table=table,
        tree_bits=torch.zeros_like(ids),
        is_tree=index([0] * rows, torch.uint8),
        logits_index=torch.arange(len(ids), device=DEVICE),
        groups=(RowGroup(0, rows, block.rows),),
    )
    positions = index([0, 1, 2, 3] * rows)
    slots = index([(r * 16 + 1) * size + p for r in range(rows) for p in range(4)])

    def step() -> torch.Tensor:
        net.inject(features, positions, slots, kv)
        hidden = net.forward(batch, kv).view(rows, block.rows, HIDDEN)
        net.choose(hidden[:, block.first_row :].transpose(0, 1).contiguous(), bonus, tokens)
        return hidden

    with torch.inference_mode():
        inputs = [
            (torch.randn_like(features), torch.randint(VOCAB, ids.shape, device=DEVICE))
            for _ in range(6)
        ]
        alone = []
        for given, new in inputs:
            features.copy_(given)
            ids.copy_(new)
            torch.cuda.synchronize()
            alone.append((step().clone(), tokens.clone()))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = step()
        for (given, new), (wanted, drafts) in zip(inputs * 20, alone * 20, strict=True):
            features.copy_(given)
            ids.copy_(new)
            graph.replay()
            assert torch.equal(hidden, wanted)
            assert torch.equal(tokens, drafts)
