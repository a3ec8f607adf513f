"""EAGLE's networks on Triton kernels against the torch ones, whichever matmul kernels run them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

from outrider.engine.forward_batch import ForwardBatch
from outrider.engine.gemm_table import CACHE_VARIABLE, Epilogue, GemmKey
from outrider.engine.kv_pool import KVPool
from outrider.engine.models.draft_loader import load_draft
from outrider.engine.models.draft_net import DraftNet, GpuDraftNet
from outrider.engine.models.draft_weights import DraftWeights, read_draft, spread_token_ids
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.models.gpu_draft import GpuDraft
from outrider.engine.models.standalone_draft import GpuStandaloneDraft
from outrider.engine.models.torch_draft import TorchDraft
from outrider.engine.weights import RandomTensors
from outrider.engine_core.draft_config import DraftConfig
from outrider.kernels.linear_config import SkinnyConfig

from ..steps import Pages, Query, Sequence, make_batch
from ..tiny import bigram_config
from .gpu_driver import DEVICE
from .test_gpu_linear import on

CPU = torch.device("cpu")
VOCAB, PAGE, PARENTS = 61, 4, [-1, 0, 0, 1, 3, 2]
MODEL = replace(
    bigram_config(VOCAB),
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
SMALL = SkinnyConfig(32, 16, warps=1, stages=1)
SHAPES: dict[tuple[int, int], Epilogue] = {
    (16, 48): "none",
    (16, 32): "none",
    (32, 32): "none",
    (32, 16): "none",
    (16, 16): "residual",
    (48, 16): "silu_mul",
    (16, 24): "residual",
    (20, 16): "none",
    (VOCAB, 16): "none",
}
EAGLE = DraftConfig(
    algorithm="EAGLE",
    model=MODEL,
    feature_size=16,
    draft_vocab_size=VOCAB,
    owns_embedding=False,
    owns_head=False,
)
EAGLE3 = DraftConfig(
    algorithm="EAGLE3",
    model=MODEL,
    feature_layers=(0, 1, 2),
    feature_size=3 * 16,
    draft_vocab_size=20,
    owns_embedding=False,
    owns_head=True,
)
CASES: dict[str, tuple[DraftConfig, dict[str, Any]]] = {
    "eagle": (EAGLE, {}),
    "eagle-bias-first-norm": (EAGLE, {"fc_bias": True, "first_layer_norm": True}),
    "eagle-hot-tokens": (EAGLE, {"hot_tokens": True, "draft_vocab_size": 30}),
    "eagle-own-tables": (EAGLE, {"owns_embedding": True, "owns_head": True}),
    "eagle-two-layers": (EAGLE, {"layers": 2}),
    "eagle3": (EAGLE3, {}),
    "eagle3-shared-head": (EAGLE3, {"owns_head": False, "draft_vocab_size": VOCAB}),
    "eagle3-bias-norm-output": (EAGLE3, {"fc_bias": True, "norm_output": True}),
    "eagle3-norm-before-fc": (EAGLE3, {"norm_before_fc": True, "owns_embedding": True}),
    "eagle3-chunk-norms": (EAGLE3, {"chunk_norms": True}),
    "eagle3-norm-before-residual": (EAGLE3, {"norm_before_residual": True}),
    "eagle3-final-state": (EAGLE3, {"feature_layers": (), "feature_size": 16, "has_fc": False}),
    "eagle3-three-layers": (EAGLE3, {"layers": 3, "norm_before_residual": True}),
}


def case(name: str) -> DraftConfig:
    config, fields = CASES[name]
    fields = dict(fields)
    layers = fields.pop("layers", 1)
    model = config.model
    model = replace(model, num_hidden_layers=layers, sliding_windows=(0,) * layers)
    return replace(config, model=model, **fields)


class Source:
    """Random tensors by name, norms among them."""

    def has(self, name: str) -> bool:
        return "hidden_norm" in name

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) + 0.5
        return torch.randn(shape, generator=generator) / math.sqrt(shape[1])


class Tables:
    """What a draft shares with its target, which never runs."""

    weight_bytes = 0

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        size = (VOCAB, MODEL.hidden_size)
        self.dtype = dtype
        self.embedding = Source().take("embedding", size).to(device, dtype) * 4
        self.output_head = Source().take("head", size).to(device, dtype)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        raise AssertionError("the target does not run")

    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("the target does not run")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.output_head).float()


def weights_of(config: DraftConfig) -> DraftWeights:
    weights = read_draft(Source(), config)
    weights.token_ids = spread_token_ids(config)
    return weights


def batches() -> Iterator[ForwardBatch]:
    """A prefill of 18 tokens, one of 3, then a tree and a plain row, then a token each."""
    pages, a, b = Pages(24, PAGE, 3), Sequence(), Sequence()
    for queries in (
        [Query(a, [7 * i % VOCAB for i in range(18)])],
        [Query(b, [5, 9, 2])],
        [Query(a, [1, 2, 3, 4, 5, 6], PARENTS), Query(b, [8])],
        [Query(a, [11]), Query(b, [12])],
    ):
        yield make_batch(queries, pages)
        for query in queries:
            query.sequence.length += len(query.tokens)


@torch.inference_mode()
def run(net: DraftNet, config: DraftConfig, device: torch.device) -> list[torch.Tensor]:
    """Recurrent states and logits of every batch, each run twice over, in float32 on the host.

    First with the target's features, then with what the first pass gave.
    """
    kv, found = KVPool(24, PAGE, config.model, net.dtype, device), []
    for index, host in enumerate(batches()):
        batch = on(host, device)
        tokens = len(batch.input_ids)
        features = Source().take(f"features {index}", (tokens, config.feature_size)) * 3
        hidden = net.fuse(features.to(device, net.dtype))
        for _ in range(2):
            before = hidden.clone()
            out = net.forward(batch, hidden, kv)
            assert torch.equal(hidden, before)
            hidden = out.recurrent.clone()
            found += [out.recurrent.float().cpu(), net.logits(out.head_input).float().cpu()]
    return found


def nets(name: str, dtype: torch.dtype) -> tuple[DraftConfig, GpuDraft, TorchDraft]:
    """The same draft in ``dtype`` and as its float32 reference."""
    config = case(name)
    target, exact = Tables(dtype, DEVICE), Tables(torch.float32, CPU)
    net = GpuDraft(weights_of(config), config, target, dtype, DEVICE)
    return config, net, TorchDraft(weights_of(config), config, exact, torch.float32, CPU)


@pytest.mark.parametrize("name", CASES)
def test_a_draft_gives_the_references_states_and_logits(name: str) -> None:
    config, net, reference = nets(name, torch.float32)
    assert net.weight_bytes == reference.weight_bytes
    assert net.config == config
    if reference.token_ids is None:
        assert net.token_ids is None
    else:
        assert net.token_ids is not None
        assert torch.equal(net.token_ids.cpu(), reference.token_ids)
    for got, wanted in zip(run(net, config, DEVICE), run(reference, config, CPU), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chosen", [True, False], ids=["streamed", "cublas"])
@pytest.mark.parametrize("name", ["eagle-two-layers", "eagle3-three-layers"])
def test_any_matmul_kernel_serves_a_draft(name: str, chosen: bool) -> None:
    config, net, reference = nets(name, torch.bfloat16)
    if chosen:
        net.choose(
            {
                GemmKey(n, k, tier, "bfloat16", epilogue): SMALL
                for (n, k), epilogue in SHAPES.items()
                for tier in (16, 32)
            }
        )
    for got, wanted in zip(run(net, config, DEVICE), run(reference, config, CPU), strict=True):
        assert (got - wanted).norm() < 0.08 * wanted.norm()


def test_a_draft_needs_a_hidden_state() -> None:
    config, net, _ = nets("eagle", torch.float32)
    kv = KVPool(24, PAGE, config.model, net.dtype, DEVICE)
    with pytest.raises(ValueError, match="hidden: this draft needs"):
        net.forward(on(next(batches()), DEVICE), None, kv)


def test_any_decoder_is_a_standalone_draft() -> None:
    config = replace(
        EAGLE, algorithm="STANDALONE", feature_size=0, owns_embedding=True, owns_head=True
    )
    model = GpuDecoder(RandomTensors(torch.float32, DEVICE, 0.3), MODEL, torch.float32, DEVICE)
    net = GpuStandaloneDraft(config, model)
    assert isinstance(net, GpuDraftNet)
    net.tune([1, 7])
    batch, kv = on(next(batches()), DEVICE), KVPool(24, PAGE, MODEL, torch.float32, DEVICE)
    out = net.forward(batch, None, kv)
    wanted = model.raw_logits(model.forward(batch, kv))
    assert torch.equal(net.logits(out.head_input), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eagle-two-layers", "eagle3-norm-before-residual"])
def test_passes_that_overlap_wait_for_each_other(name: str) -> None:
    """Replays of three passes between writes of their input give the bits of lone launches."""
    assert DEVICE.type == "cuda"
    config, dtype = case(name), torch.bfloat16
    net = GpuDraft(weights_of(config), config, Tables(dtype, DEVICE), dtype, DEVICE)
    kv = KVPool(24, PAGE, config.model, dtype, DEVICE)
    batch = on(next(batches()), DEVICE)
    ids = batch.input_ids
    features = torch.randn(len(ids), config.feature_size, device=DEVICE).to(dtype)

    def step() -> torch.Tensor:
        hidden = net.fuse(features)
        for _ in range(3):
            out = net.forward(batch, hidden, kv)
            hidden = out.recurrent
        return net.logits(out.head_input)

    with torch.inference_mode():
        inputs = [torch.randint(VOCAB, ids.shape, device=DEVICE) for _ in range(8)]
        alone = []
        for tokens in inputs:
            ids.copy_(tokens)
            torch.cuda.synchronize()
            alone.append(step().clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        for tokens, wanted in zip(inputs * 25, alone * 25, strict=True):
            ids.copy_(tokens)
            graph.replay()
            assert torch.equal(logits, wanted)


@pytest.mark.gpu
def test_tuning_is_kept_and_the_loader_takes_this_net(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEVICE.type == "cuda"
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    dtype, model = torch.bfloat16, replace(
        MODEL, hidden_size=512, intermediate_size=1536, num_attention_heads=8, head_dim=64
    )  # fmt: skip
    target = GpuDecoder(RandomTensors(dtype, DEVICE, 0.05), model, dtype, DEVICE)
    config, logits = replace(EAGLE3, model=model, feature_size=3 * 512), []
    for _ in range(2):
        net = load_draft(tmp_path, config, target, dtype, DEVICE, "dummy")
        assert isinstance(net, GpuDraft)
        net.tune([1, 7, 40, 500])
        (table,) = (tmp_path / "gemm").iterdir()
        kv, batch = KVPool(24, PAGE, model, dtype, DEVICE), on(next(batches()), DEVICE)
        out = net.forward(batch, net.fuse(torch.ones(18, 3 * 512, dtype=dtype, device=DEVICE)), kv)
        logits.append((table.stat().st_mtime_ns, net.logits(out.head_input)))
    assert logits[0][0] == logits[1][0]
    assert torch.equal(logits[0][1], logits[1][1])
