"""The weight-streaming matmul against float64: shapes around a tile, splits, epilogues, padding."""

import math
from dataclasses import replace

import pytest
import torch

from outrider.kernels import linear, linear_gpu, skinny_linear_gpu
from outrider.kernels.linear_config import SkinnyConfig, candidates, row_tier, splits, tiles
from outrider.kernels.split_workspace import SplitWorkspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 after widening it; the GPU takes all three.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SMALL = SkinnyConfig(block_n=32, block_k=32, stages=2)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows, columns), math.nan, dtype=dtype, device=DEVICE)


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    out = x.double() @ weight.double().t()
    out = out if bias is None else out + bias.double()
    return out if residual is None else out + residual.double()


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * scale)


def strided(tensor: torch.Tensor, pad: int = 16) -> torch.Tensor:
    """The same values as rows of a wider tensor whose other columns are NaN."""
    wide = poisoned(tensor.shape[0] + 3, tensor.shape[1] + pad, tensor.dtype)
    wide[: tensor.shape[0], : tensor.shape[1]] = tensor
    return wide[: tensor.shape[0], : tensor.shape[1]]


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 65])
@pytest.mark.parametrize("split", [1, 3])
def test_rows_around_a_tile(rows: int, split: int) -> None:
    x, weight = strided(draw(rows, 96)), strided(draw(48, 96, seed=1))
    config = SkinnyConfig(32, 32, split_k=split, stages=2)
    out = skinny_linear_gpu.skinny_linear(x, weight, config=config, out=poisoned(rows, 48))
    assert_near(out, exact(x, weight))


@pytest.mark.parametrize("n", [1, 31, 32, 33])
@pytest.mark.parametrize("k", [1, 31, 32, 33])
@pytest.mark.parametrize("split", [1, 2])
def test_columns_and_depth_around_a_tile(n: int, k: int, split: int) -> None:
    x, weight = strided(draw(3, k)), strided(draw(n, k, seed=1))
    config = SkinnyConfig(32, 32, split_k=split, stages=2)
    out = skinny_linear_gpu.skinny_linear(x, weight, config=config, out=poisoned(3, n))
    assert_near(out, exact(x, weight))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("split", [1, 2])
def test_bias_and_residual_of_every_dtype(dtype: torch.dtype, tma: bool, split: int) -> None:
    x, weight = strided(draw(5, 88, dtype=dtype)), strided(draw(40, 88, dtype=dtype, seed=1))
    bias, residual = draw(40, dtype=dtype, seed=2), strided(draw(5, 40, dtype=dtype, seed=3))
    config = SkinnyConfig(32, 32, split_k=split, stages=2, tma=tma)
    out = strided(poisoned(5, 40, dtype))
    result = skinny_linear_gpu.skinny_linear(
        x, weight, config=config, bias=bias, residual=residual, out=out
    )
    assert result is out
    assert_near(out, exact(x, weight, bias, residual))
    assert_near(linear.linear(x, weight, bias, residual), exact(x, weight, bias, residual))


@pytest.mark.parametrize("block", [1, 8, 16])
@pytest.mark.parametrize("split", [1, 2])
def test_gate_and_up_meet_in_a_tile(block: int, split: int) -> None:
    x, weight, bias = draw(4, 64), draw(96, 64, seed=1) / 8, draw(96, seed=2)
    gate, up = exact(x, weight, bias).chunk(2, dim=1)
    expected = gate * torch.sigmoid(gate) * up
    weight, bias = linear.interleave_gate_up(weight, block), linear.interleave_gate_up(bias, block)
    config = SkinnyConfig(32, 32, split_k=split, stages=2)
    out = skinny_linear_gpu.skinny_linear(
        x, weight, config=config, bias=bias, silu_block=block, out=poisoned(4, 48)
    )
    assert_near(out, expected)
    assert_near(linear.linear_silu_mul(x, weight, bias, block=block), expected)
    assert_near(linear_gpu.linear_silu_mul(x, weight, bias, block=block), expected)


def test_interleaving_puts_each_up_block_behind_its_gate_block() -> None:
    rows = linear.interleave_gate_up(torch.arange(12), 2)
    assert rows.tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    with pytest.raises(ValueError, match="12 rows cannot be interleaved in blocks of 4"):
        linear.interleave_gate_up(torch.arange(12), 4)


def test_extreme_gates_stay_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -200.0, 3.0, 2.0, 1.0, -1.0, 0.5]], device=DEVICE)
    out = linear_gpu.silu_mul_interleaved(gate_up, 4)
    expected = linear.silu_mul_interleaved(gate_up.double(), 4)
    torch.testing.assert_close(out.double(), expected)


@pytest.mark.parametrize("split", [1, 4])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(split: int) -> None:
    x, weight = draw(16, 128, dtype=torch.float16), draw(40, 128, dtype=torch.float16, seed=1)
    config = SkinnyConfig(32, 32, split_k=split, stages=2)
    together = skinny_linear_gpu.skinny_linear(x, weight, config=config)
    for rows in (1, 2, 7):
        alone = skinny_linear_gpu.skinny_linear(x[:rows], weight, config=config)
        assert torch.equal(alone, together[:rows])
    assert torch.equal(skinny_linear_gpu.skinny_linear(x, weight, config=config), together)


def test_a_workspace_is_left_ready_for_the_next_matmul() -> None:
    config = SkinnyConfig(32, 32, split_k=2, stages=2)
    workspace = SplitWorkspace(DEVICE, *SplitWorkspace.need(20, 96, 64, config))
    workspace.partial.fill_(math.nan)
    for rows, n in ((20, 96), (3, 40)):
        x, weight = draw(rows, 64), draw(n, 64, seed=1)
        out = skinny_linear_gpu.skinny_linear(x, weight, config=config, workspace=workspace)
        assert_near(out, exact(x, weight))
        assert not workspace.arrived.any()
    with pytest.raises(ValueError, match="workspace is too small"):
        skinny_linear_gpu.skinny_linear(
            draw(33, 64), draw(96, 64), config=config, workspace=workspace
        )


def test_no_rows_give_no_rows() -> None:
    assert skinny_linear_gpu.skinny_linear(draw(0, 64), draw(40, 64), config=SMALL).shape == (0, 40)
    assert linear_gpu.silu_mul_interleaved(draw(0, 64), 8).shape == (0, 32)


def test_without_a_configuration_cublas_is_called() -> None:
    x, weight, bias, residual = draw(4, 64), draw(40, 64, seed=1), draw(40), draw(4, 40)
    for args in ((None, None), (bias, None), (None, residual), (bias, residual)):
        assert_near(linear_gpu.linear(x, weight, *args), exact(x, weight, *args))
        assert_near(linear_gpu.linear(x, weight, *args, config=SMALL), exact(x, weight, *args))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = draw(4, 64), draw(40, 64)
    with pytest.raises(ValueError, match="129 rows"):
        skinny_linear_gpu.skinny_linear(draw(129, 64), weight, config=SMALL)
    with pytest.raises(ValueError, match=r"\[4, 64\] and weight"):
        skinny_linear_gpu.skinny_linear(x, weight[:, :32], config=SMALL)
    with pytest.raises(ValueError, match="bias"):
        skinny_linear_gpu.skinny_linear(x, weight, config=SMALL, bias=draw(39))
    with pytest.raises(ValueError, match="residual"):
        skinny_linear_gpu.skinny_linear(x, weight, config=SMALL, residual=draw(4, 39))
    with pytest.raises(ValueError, match="contiguous columns"):
        skinny_linear_gpu.skinny_linear(draw(64, 4).t(), weight, config=SMALL)
    with pytest.raises(ValueError, match="silu_block"):
        skinny_linear_gpu.skinny_linear(x, weight, config=SMALL, silu_block=8)
    with pytest.raises(ValueError, match="out is"):
        skinny_linear_gpu.skinny_linear(x, weight, config=SMALL, out=draw(4, 39))
    with pytest.raises(ValueError, match="tma needs"):
        skinny_linear_gpu.skinny_linear(draw(4, 63), draw(40, 63), config=replace(SMALL, tma=True))
    with pytest.raises(ValueError, match="block_n is 48"):
        SkinnyConfig(48, 32)
    with pytest.raises(ValueError, match="split_k and stages"):
        SkinnyConfig(32, 32, split_k=0)


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_candidates_fit_shared_memory_and_cover_k(block_m: int) -> None:
    for n, k in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)):
        found = candidates(n, k, block_m)
        assert 4 <= len(found) <= 160
        assert len(set(found)) == len(found)
        assert all(c.shared_bytes(block_m, 2) <= 227 * 1024 for c in found)
        assert all(k % (c.block_k * c.split_k) == 0 for c in found)
    assert [row_tier(m) for m in (1, 16, 17, 64, 65, 128)] == [16, 16, 32, 64, 128, 128]


def test_splits_of_an_awkward_depth() -> None:
    assert splits(next(tiles(16)), 64, 31, 16) == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 31, 128])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1000, 4104)])
@pytest.mark.parametrize(("tma", "split"), [(False, 4), (True, 1), (True, 4)])
def test_model_shapes_on_a_gpu(rows: int, n: int, k: int, tma: bool, split: int) -> None:
    x, weight = draw(rows, k, dtype=torch.bfloat16), draw(n, k, dtype=torch.bfloat16, seed=1)
    residual = draw(rows, n, dtype=torch.bfloat16, seed=2)
    config = SkinnyConfig(128, 64, split_k=split, stages=3, warps=8, tma=tma)
    first: torch.Tensor | None = None
    for pdl in (False, True, True):
        out = poisoned(rows, n, torch.bfloat16)
        skinny_linear_gpu.skinny_linear(
            x, weight, config=config, residual=residual, out=out, pdl=pdl
        )
        first = out if first is None else first
        assert torch.equal(out, first)
    assert first is not None
    assert_near(first, exact(x, weight, residual=residual))


@pytest.mark.gpu
def test_a_captured_chain_with_dependent_launches() -> None:
    config = SkinnyConfig(64, 128, split_k=4, stages=4)
    x = draw(8, 1024, dtype=torch.bfloat16)
    weights = [draw(1024, 1024, dtype=torch.bfloat16, seed=s) / 32 for s in range(8)]
    workspace = SplitWorkspace(DEVICE, *SplitWorkspace.need(8, 1024, 1024, config))

    def chain(pdl: bool) -> torch.Tensor:
        hidden = x
        for weight in weights:
            hidden = skinny_linear_gpu.skinny_linear(
                hidden, weight, config=config, residual=x, workspace=workspace, pdl=pdl
            )
        return hidden

    expected = chain(False).clone()
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(True)
    for _ in range(20):
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, expected)
