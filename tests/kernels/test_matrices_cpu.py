"""Native matmul and norm against torch, and their independence of the batch shape."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.kernels.matrices_cpu import Arena, PackedMatrix, linear, rms_norm
from outrider.kernels.native_cpu import instruction_sets
from outrider.kernels.rms_norm import rms_norm as rms_norm_reference

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 48, 61, 64, 200)
SHAPES = ((16, 8), (64, 33), (70, 256), (7, 1), (131, 301), (33, 2000))


def packed(
    weight: torch.Tensor, bias: torch.Tensor | None = None, int8: bool = False
) -> PackedMatrix:
    bits = weight.view(torch.uint16) if weight.dtype == torch.bfloat16 else weight
    return PackedMatrix(bits.numpy(), None if bias is None else bias.numpy(), int8=int8)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What a row's integers times its scale are."""
    most = weight.float().abs().amax(1, keepdim=True)
    return torch.round(weight.float() / most * 127).double() * (most.double() / 127)


def run(x: torch.Tensor, matrix: PackedMatrix, isa: Any = None) -> torch.Tensor:
    out = torch.full((x.shape[0], matrix.shape[0]), float("nan"))
    linear(x.numpy(), matrix, out.numpy(), isa=isa)
    return out


@pytest.mark.parametrize("int8", [False, True], ids=["whole", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", instruction_sets())
def test_linear(dtype: torch.dtype, shape: tuple[int, int], isa: str, int8: bool) -> None:
    torch.manual_seed(shape[0])
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0])
    x = torch.randn(max(ROWS), shape[1])
    meant = rounded(weight) if int8 else weight.double()
    exact = x.double() @ meant.T
    tolerance = 1e-6 * float((x.abs().double() @ meant.abs().T).max())
    plain, biased = packed(weight, int8=int8), packed(weight, bias, int8)
    assert plain.nbytes == -(-shape[0] // 16) * 16 * shape[1] * (1 if int8 else dtype.itemsize)
    whole = run(x, plain, isa)
    torch.testing.assert_close(whole.double(), exact, atol=tolerance, rtol=0)
    torch.testing.assert_close(
        run(x, biased, isa).double(), exact + bias, atol=tolerance + 1e-6, rtol=0
    )
    for rows in ROWS:
        assert torch.equal(run(x[:rows], plain, isa), whole[:rows]), rows
        assert torch.equal(run(x[-rows:].contiguous(), plain, isa), whole[-rows:]), rows


@pytest.mark.skipif("avx512" not in instruction_sets(), reason="needs AVX-512")
@pytest.mark.parametrize("int8", [False, True], ids=["whole", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_avx512_and_avx2_give_the_same_bits(dtype: torch.dtype, int8: bool) -> None:
    for shape in (*SHAPES, (256, 64), (80, 31)):
        matrix = packed(torch.randn(shape).to(dtype), int8=int8)
        x = torch.randn(max(ROWS), shape[1])
        for rows in ROWS:
            wide, narrow = (run(x[:rows], matrix, isa) for isa in ("avx512", "avx2"))
            assert torch.equal(wide, narrow), (shape, rows)


def test_a_row_of_zeros_rounds_to_zeros() -> None:
    weight = torch.randn(20, 9)
    weight[3] = 0.0
    out = run(torch.randn(2, 9), packed(weight, int8=True))
    assert (out[:, 3] == 0.0).all()
    assert torch.isfinite(out).all()


def test_float32_and_bfloat16_storage_give_the_same_bits() -> None:
    weight = torch.randn(96, 128).bfloat16()
    x = torch.randn(13, 128)
    assert torch.equal(run(x, packed(weight)), run(x, packed(weight.float())))


def test_rms_norm() -> None:
    for size in (8, 13, 64, 250):
        x, weight = torch.randn(9, size) * 3, torch.rand(size)
        expected = rms_norm_reference(x, weight, 1e-5)
        for isa in instruction_sets():
            out = torch.empty_like(x)
            rms_norm(x.numpy(), weight.numpy(), 1e-5, out.numpy(), isa=isa)
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_matrices_share_an_arena_and_spill_over_it() -> None:
    arena = Arena(16 * 32 * 4)
    weights = [torch.randn(16, 32) for _ in range(3)]
    matrices = [PackedMatrix(weight.numpy(), arena=arena) for weight in weights]
    del arena
    x = torch.randn(2, 32)
    for weight, matrix in zip(weights, matrices, strict=True):
        torch.testing.assert_close(run(x, matrix), x @ weight.T, atol=1e-5, rtol=1e-5)
        assert matrix.nbytes == weight.nbytes


def test_wrong_arguments_are_named() -> None:
    weight: NDArray[np.float32] = np.zeros((16, 8), dtype=np.float32)
    matrix = PackedMatrix(weight)
    assert instruction_sets()[-1] == "base"
    with pytest.raises(ValueError, match="isa"):
        run(torch.zeros(2, 8), matrix, "sse9")
    with pytest.raises(ValueError, match="widths"):
        run(torch.zeros(2, 9), matrix)
    with pytest.raises(ValueError, match="rows"):
        linear(weight, matrix, np.zeros((3, 16), dtype=np.float32))
    with pytest.raises(ValueError, match="bias"):
        PackedMatrix(weight, np.zeros(3, dtype=np.float32))
    with pytest.raises(ValueError, match="pairs=True"):
        PackedMatrix(weight[:3], pairs=True)
    with pytest.raises(ValueError, match="num_bytes"):
        Arena(0)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(weight, weight[0, :3].copy(), 1e-6, weight)
    linear(weight[:0], matrix, np.zeros((0, 16), dtype=np.float32))
