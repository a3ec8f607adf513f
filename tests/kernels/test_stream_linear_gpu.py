"""The Hopper matmul: its cuts everywhere, its results on a GPU."""

import math

import pytest
import torch

from outrider.kernels import linear, linear_gpu
from outrider.kernels.linear_config import SHARED_BYTES
from outrider.kernels.split_workspace import SplitWorkspace
from outrider.kernels.stream_config import StreamConfig, shared_bytes, stream_shortlist
from outrider.kernels.stream_linear_gpu import stream_linear

ONE = StreamConfig(1, 64, 4)
CUTS = [
    ONE,
    StreamConfig(1, 128, 3),
    StreamConfig(1, 64, 2, split=3),
    StreamConfig(3, 64, 3),
    StreamConfig(2, 64, 3, split=2),
    StreamConfig(1, 64, 3, programs=5),
    StreamConfig(2, 64, 4, warps=8, programs=7),
    StreamConfig(4, 64, 2, programs=3),
]
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (768, 256)]


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    if not on_hopper():
        pytest.skip("needs compute capability 9.0")
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full((rows, columns), math.nan, dtype=dtype, device="cuda")


def strided(tensor: torch.Tensor, pad: int = 16) -> torch.Tensor:
    """The same values as rows of a wider tensor whose other columns and rows are NaN."""
    wide = poisoned(tensor.shape[0] + 3, tensor.shape[1] + pad, tensor.dtype)
    wide[: tensor.shape[0], : tensor.shape[1]] = tensor
    return wide[: tensor.shape[0], : tensor.shape[1]]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1.6e-2 if actual.dtype == torch.bfloat16 else 2e-3
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"block_k": 32}, "block_k is 32"),
        ({"block_k": 96}, "block_k is 96"),
        ({"tiles": 5}, "1 to 4 tiles"),
        ({"stages": 1}, "stages >= 2"),
        ({"split": 0}, "split >= 1"),
        ({"warps": 2}, "warps is 2"),
    ],
)
def test_a_configuration_that_no_kernel_can_run_is_refused(
    wrong: dict[str, int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        StreamConfig(**{"tiles": 1, "block_k": 64, "stages": 4, **wrong})


@pytest.mark.parametrize("config", CUTS)
@pytest.mark.parametrize(("n", "k"), [(1, 8), (64, 64), (65, 72), (1000, 1000), (151936, 4096)])
def test_every_unit_is_dealt_once_and_parts_have_room(config: StreamConfig, n: int, k: int) -> None:
    depth, per, programs = config.dealt(n, k)
    tiles = -(-n // (64 * config.tiles))
    assert (programs - 1) * per < tiles * depth <= programs * per
    assert depth * config.block_k >= k
    split = {u // depth for p in range(1, programs) for u in (p * per,) if u % depth}
    sums, counters = config.scratch(16, n, k)
    assert bool(split) <= bool(sums)
    if sums:
        assert sums == 2 * programs * config.tiles * 64 * 16
        assert counters == tiles


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_a_shortlist_is_short_and_fits_a_multiprocessor(
    n: int, k: int, block_m: int, gated: bool
) -> None:
    found = stream_shortlist(n, k, block_m, gated=gated)
    assert 1 <= len(found) <= 8
    assert len(set(found)) == len(found)
    assert all(shared_bytes(config, block_m, gated) <= SHARED_BYTES for config in found)
    assert stream_shortlist(n, k + 4, block_m, gated=gated) == []


@pytest.mark.gpu
@pytest.mark.parametrize("config", CUTS)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 65, 128])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (64, 64), (65, 72), (200, 320), (448, 1000)])
def test_it_equals_float64(config: StreamConfig, rows: int, n: int, k: int) -> None:
    x, weight = strided(draw(rows, k)), strided(draw(n, k, seed=1))
    bias, residual = draw(n, seed=2), strided(draw(rows, n, seed=3))
    out = strided(poisoned(rows, n))
    expected = x.double() @ weight.double().t()
    assert_near(stream_linear(x, weight, config=config, out=out), expected)
    out.fill_(math.nan)
    stream_linear(x, weight, config=config, bias=bias, residual=residual, out=out)
    assert_near(out, expected + bias.double() + residual.double())
    assert_near(linear.linear(x, weight, bias, residual), out.double())


@pytest.mark.gpu
@pytest.mark.parametrize("config", CUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_and_up_meet_in_a_tile(config: StreamConfig, dtype: torch.dtype) -> None:
    x, weight = draw(20, 192, dtype=dtype), draw(416, 192, dtype=dtype, seed=1) / 8
    bias = draw(416, dtype=dtype, seed=2)
    gate, up = (x.double() @ weight.double().t() + bias.double()).chunk(2, dim=1)
    weight, bias = linear.interleave_gate_up(weight, 8), linear.interleave_gate_up(bias, 8)
    out = stream_linear(
        x, weight, config=config, bias=bias, silu_block=8, out=poisoned(20, 208, dtype)
    )
    assert_near(out, gate * torch.sigmoid(gate) * up)
    assert torch.equal(out, linear_gpu.linear_silu_mul(x, weight, bias, block=8, config=config))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CUTS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(config: StreamConfig) -> None:
    x, weight = draw(16, 512), draw(640, 512, seed=1)
    together = stream_linear(x, weight, config=config)
    for rows in (1, 2, 7):
        assert torch.equal(stream_linear(x[:rows], weight, config=config), together[:rows])
    assert all(torch.equal(stream_linear(x, weight, config=config), together) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CUTS)
def test_a_chain_of_dependent_launches_sees_what_went_before(config: StreamConfig) -> None:
    """Each link reads the last one's output through the smallest of gaps, many times over."""
    weights = [draw(1024, 1024, seed=i) / 32 for i in range(6)]
    x = draw(8, 1024)
    needs = SplitWorkspace.need(8, 1024, 1024, config)
    workspace = SplitWorkspace("cuda", *needs)
    workspace.partial.fill_(math.nan)

    def chain(config: StreamConfig | None) -> torch.Tensor:
        stream = x
        for weight in weights:
            stream = linear_gpu.linear(
                stream, weight, None, stream, config=config, workspace=workspace, pdl=True
            )
        return stream

    expected = chain(config)
    assert_near(expected, chain(None).double())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(config)
    for _ in range(200):
        graph.replay()
        assert torch.equal(out, expected)
        out.fill_(math.nan)
    assert not workspace.arrived.any()


@pytest.mark.gpu
def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight = draw(4, 64), draw(128, 64, seed=1)
    with pytest.raises(ValueError, match="blocks of 8, not 16"):
        stream_linear(x, weight, config=ONE, silu_block=16)
    with pytest.raises(ValueError, match="needs"):
        stream_linear(x, weight, config=ONE, out=poisoned(4, 127))
    small = SplitWorkspace("cuda", 8, 1)
    with pytest.raises(ValueError, match="workspace is too small"):
        stream_linear(draw(4, 512), draw(128, 512), config=CUTS[2], workspace=small)
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        stream_linear(x.float(), weight.float(), config=ONE)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        stream_linear(draw(4, 65)[:, 1:], weight, config=ONE)
    assert stream_linear(x[:0], weight, config=ONE).shape == (0, 128)
