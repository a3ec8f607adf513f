"""The decoder's matmuls by choice: the reference's logits, whichever kernel runs them."""

from collections.abc import Iterator
from copy import copy
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F

from outrider.engine.forward_batch import ForwardBatch
from outrider.engine.gemm_table import CACHE_VARIABLE, Epilogue, GemmKey
from outrider.engine.kv_pool import KVPool
from outrider.engine.models import GpuModel
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.models.gpu_linear import GpuLinear
from outrider.engine.models.torch_decoder import TorchDecoder
from outrider.engine.weights import Checkpoint, RandomTensors
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.kernels.linear_config import SkinnyConfig
from outrider.kernels.linear_gpu import LinearConfig
from outrider.kernels.stream_config import StreamConfig

from ..steps import Pages, Query, Sequence, make_batch
from ..tiny import bigram_config, write_checkpoint
from .gpu_driver import DEVICE

VOCAB, PAGE = 61, 4
SMALL = SkinnyConfig(32, 16, warps=1, stages=1)
# Of the tiny checkpoint: hidden 16, inner 24, heads of 8, two for queries and one for KV.
SHAPES: dict[tuple[int, int], tuple[Epilogue, SkinnyConfig]] = {
    (32, 16): ("none", SMALL),
    (16, 16): ("residual", SMALL),
    (48, 16): ("silu_mul", SMALL),
    (16, 24): ("residual", replace(SMALL, split_k=2)),
    (VOCAB, 16): ("none", replace(SMALL, tma=True)),
}
PARENTS = [-1, 0, 0, 1, 3, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("linear") / "model", VOCAB)


def choices(dtype: str, tiers: tuple[int, ...] = (16,)) -> dict[GemmKey, SkinnyConfig]:
    return {
        GemmKey(n, k, tier, dtype, epilogue): config
        for (n, k), (epilogue, config) in SHAPES.items()
        for tier in tiers
    }


def on(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    moved = copy(batch)
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            setattr(moved, field.name, value.to(device))
    return moved


def batches() -> Iterator[ForwardBatch]:
    """A prefill of 18 tokens, one of 3, then a tree and a plain row."""
    pages, a, b = Pages(20, PAGE, 3), Sequence(), Sequence()
    for queries in (
        [Query(a, [7 * i % VOCAB for i in range(18)])],
        [Query(b, [5, 9, 2])],
        [Query(a, [1, 2, 3, 4, 5, 6], PARENTS), Query(b, [8])],
    ):
        yield make_batch(queries, pages)
        for query in queries:
            query.sequence.length += len(query.tokens)


@torch.inference_mode()
def run(
    model: TorchDecoder | GpuDecoder, config: ModelConfig, device: torch.device
) -> list[torch.Tensor]:
    """Logits of every batch and the captured streams, float32 on the host."""
    kv, found = KVPool(20, PAGE, config, model.dtype, device), []
    for batch in batches():
        hidden, streams = model.forward_capture(on(batch, device), kv, (0, 1, 2))
        found += [tensor.float().cpu() for tensor in (model.logits(hidden), streams)]
    return found


@pytest.mark.parametrize(
    ("dtype", "tolerance", "chosen"),
    [(torch.bfloat16, 0.06, True), (torch.bfloat16, 0.06, False), (torch.float32, 1e-4, True)],
    ids=["bf16-streamed", "bf16-cublas", "f32"],
)
def test_a_decoder_gives_the_references_logits(
    folder: Path, dtype: torch.dtype, tolerance: float, chosen: bool
) -> None:
    config, cpu = load_model_config(folder), torch.device("cpu")
    model = GpuDecoder(Checkpoint(folder), config, dtype, DEVICE)
    if chosen:
        model.choose(choices(str(dtype).removeprefix("torch.")))
    expected = run(TorchDecoder(Checkpoint(folder), config, torch.float32, cpu), config, cpu)
    for got, wanted in zip(run(model, config, DEVICE), expected, strict=True):
        # Against the float32 reference: an error of bfloat16 relative to the largest number.
        assert (got - wanted).abs().max() < tolerance * wanted.abs().max()


def test_choices_are_by_dtype_tier_and_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, SkinnyConfig | None]] = []

    def linear(x: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        config = options["config"]
        assert config is None or isinstance(config, SkinnyConfig)
        used.append((len(x), config))
        return x

    monkeypatch.setattr("outrider.engine.models.gpu_linear.linear", linear)
    weight = torch.zeros(16, 16, dtype=torch.bfloat16, device=DEVICE)
    layer = GpuLinear(DEVICE, torch.bfloat16)
    assert not layer.fuses_residual(1, weight)
    layer.choose({**choices("bfloat16", (16, 128)), **choices("float16", (32,))})
    for rows in (1, 16, 17, 32, 65, 128, 129):
        x = torch.ones(rows, 16, dtype=torch.bfloat16, device=DEVICE)
        config = SMALL if rows <= 16 or 64 < rows <= 128 else None
        assert layer.fuses_residual(rows, weight) == (config is not None)
        layer.linear(x, weight, residual=x)
        assert used.pop() == (rows, config)
        layer.linear(x, weight)
        assert used.pop() == (rows, None)  # no choice without the epilogue
        assert not used
    assert not layer.fuses_residual(0, weight)
    exact = GpuLinear(DEVICE, torch.float32)
    exact.choose(choices("float32"))
    assert not exact.fuses_residual(1, weight)


def test_without_a_choice_a_residual_is_still_added() -> None:
    layer = GpuLinear(DEVICE, torch.float32)
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    residual = torch.randn(3, 5)
    for shift in (None, bias):
        wanted = F.linear(x, weight, shift) + residual
        got = layer.linear(
            x.to(DEVICE),
            weight.to(DEVICE),
            bias=None if shift is None else shift.to(DEVICE),
            residual=residual.to(DEVICE),
        )
        torch.testing.assert_close(got.cpu(), wanted, atol=1e-5, rtol=1e-5)


def test_an_uneven_width_is_interleaved_in_smaller_blocks(folder: Path) -> None:
    config = msgspec.structs.replace(load_model_config(folder), intermediate_size=12)
    cpu = torch.device("cpu")
    source = RandomTensors(torch.float32, cpu, 0.5)
    wanted = run(TorchDecoder(source, config, torch.float32, cpu), config, cpu)
    source = RandomTensors(torch.float32, cpu, 0.5)
    got = run(GpuDecoder(source, config, torch.float32, DEVICE), config, DEVICE)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_nothing_is_tuned_in_float32(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    model = GpuDecoder(Checkpoint(folder), load_model_config(folder), torch.float32, DEVICE)
    assert isinstance(model, GpuModel)
    model.tune([1, 64])
    assert not list(tmp_path.iterdir())


def wide_config() -> ModelConfig:
    """Shapes that the shortlists fit."""
    return msgspec.structs.replace(
        bigram_config(4096 + 3),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_windows=(0, 0),
        qk_norm=True,
    )


@pytest.mark.gpu
def test_tuning_is_kept_and_a_captured_pass_repeats_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEVICE.type == "cuda"
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    config, dtype, outputs = wide_config(), torch.bfloat16, []
    for _ in range(2):
        model = GpuDecoder(RandomTensors(dtype, DEVICE, 0.05), config, dtype, DEVICE)
        model.tune([1, 7, 40, 500])
        (table,) = (tmp_path / "gemm").iterdir()
        outputs.append((table.stat().st_mtime_ns, run(model, config, DEVICE)))
    assert outputs[0][0] == outputs[1][0]
    assert all(map(torch.equal, outputs[0][1], outputs[1][1]))
    reference = TorchDecoder(RandomTensors(dtype, DEVICE, 0.05), config, dtype, DEVICE)
    for got, wanted in zip(outputs[0][1], run(reference, config, DEVICE), strict=True):
        assert (got - wanted).abs().max() < 0.06 * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "cublas"])
def test_kernels_that_overlap_wait_for_each_other(streamed: bool) -> None:
    """Replays of a whole pass between writes of its input give the bits of lone launches."""
    assert DEVICE.type == "cuda"
    config, dtype = wide_config(), torch.bfloat16
    model = GpuDecoder(RandomTensors(dtype, DEVICE, 0.05), config, dtype, DEVICE)
    if streamed:
        shapes: list[tuple[int, int, Epilogue]] = [
            (768, 512, "none"),
            (512, 512, "residual"),
            (3072, 512, "silu_mul"),
            (512, 1536, "residual"),
            (4099, 512, "none"),
        ]
        configs: list[LinearConfig] = [SkinnyConfig(64, 128, 2, 4, 3)] * 5
        if torch.cuda.get_device_capability() == (9, 0):  # what is chosen on Hopper
            configs = [
                StreamConfig(1, 128, 4),
                StreamConfig(1, 64, 3, split=2),
                StreamConfig(3, 64, 3),
                StreamConfig(2, 64, 3, split=4),
                StreamConfig(1, 128, 4, programs=132),
            ]
        model.choose(
            {
                GemmKey(n, k, 16, "bfloat16", epilogue): config
                for (n, k, epilogue), config in zip(shapes, configs, strict=True)
            }
        )
    pages, sequences = Pages(20, PAGE, 3), [Sequence(), Sequence()]
    batch = on(make_batch([Query(s, [5, 9, 2, 4]) for s in sequences], pages), DEVICE)
    kv = KVPool(20, PAGE, config, dtype, DEVICE)

    def step() -> torch.Tensor:
        return model.raw_logits(model.forward(batch, kv))

    with torch.inference_mode():
        ids = [torch.randint(4096, (8,), device=DEVICE) for _ in range(8)]
        alone = []
        for tokens in ids:
            batch.input_ids.copy_(tokens)
            torch.cuda.synchronize()
            alone.append(step().clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for tokens, wanted in zip(ids * 25, alone * 25, strict=True):
            batch.input_ids.copy_(tokens)
            graph.replay()
            assert torch.equal(out, wanted)
