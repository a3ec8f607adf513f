"""The small fused kernels against float64: interpreted on a CPU, compiled on a GPU.

Memory that a kernel leaves unwritten holds NaN (the largest integer): torch fills what it
allocates under deterministic algorithms.
"""

import math
from collections.abc import Iterator

import pytest
import torch

from outrider.kernels import add_rms_norm as add_rms_norm_torch
from outrider.kernels import embedding as embedding_torch
from outrider.kernels import qk_rope_write as qk_rope_write_torch
from outrider.kernels import qk_rope_write_gpu, silu_mul_gpu
from outrider.kernels import rms_norm as rms_norm_torch
from outrider.kernels import silu_mul as silu_mul_torch
from outrider.kernels.add_rms_norm_gpu import add_rms_norm
from outrider.kernels.embedding_gpu import embed
from outrider.kernels.qk_rope_write_gpu import qk_norm_rope_write
from outrider.kernels.rms_norm_gpu import rms_norm
from outrider.kernels.silu_mul_gpu import gelu_tanh_mul, silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# float32 sums, or two roundings of the result; the interpreter truncates to bfloat16
TOLERANCE = {
    torch.float32: 3e-6,
    torch.bfloat16: 2.0**-7 if DEVICE == "cuda" else 2.0**-6,
    torch.float16: 2.0**-10,
}
EPS = 1e-6
PDL = [False, pytest.param(True, marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _poison_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def padded(rows: torch.Tensor, extra: int = 8) -> torch.Tensor:
    """The same rows as a view into wider ones whose rest is NaN."""
    wide = rows.new_full((rows.shape[0], rows.shape[1] + extra), math.nan)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[actual.dtype]
    # a rotation's difference may cancel; only float32 keeps its terms' rounding errors
    cancels = actual.dtype == torch.float32 and actual.numel()
    largest = max(1.0, float(expected.abs().max())) if cancels else 1.0
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance / 4 * largest
    )


def normed(x: torch.Tensor, weight: torch.Tensor, gemma: bool) -> torch.Tensor:
    """float64 RMS norm, without roundings."""
    wide, gain = x.double(), weight.double() + gemma
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (2, 255), (3, 256), (1, 257)])
def test_norms_match_float64(
    rows: int, width: int, dtype: torch.dtype, gemma: bool, pdl: bool
) -> None:
    x, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    residual = randn(rows, width, dtype=dtype, seed=2)
    total = residual + x

    assert_near(rms_norm(padded(x), weight, EPS, gemma=gemma, pdl=pdl), normed(x, weight, gemma))
    assert_near(rms_norm_torch.rms_norm(x, weight, EPS, gemma=gemma), normed(x, weight, gemma))

    stream = padded(residual)
    actual = add_rms_norm(padded(x), stream, weight, EPS, gemma=gemma, pdl=pdl)
    if DEVICE == "cuda" or dtype != torch.bfloat16:
        assert torch.equal(stream, total)
    assert_near(stream, total)
    # normed is what was stored, not the exact sum
    assert_near(actual, normed(stream, weight, gemma))
    padding = stream.as_strided((rows, 8), stream.stride(), stream.storage_offset() + width)
    assert padding.isnan().all()

    same = add_rms_norm_torch.add_rms_norm(x, residual.clone(), weight, EPS, gemma=gemma)
    assert_near(same, normed(total, weight, gemma))

    before, places = residual.clone(), [padded(torch.full_like(x, math.nan)) for _ in range(2)]
    aside = add_rms_norm(x, residual, weight, EPS, gemma=gemma, total=places[0], pdl=pdl)
    assert torch.equal(aside, actual)
    same = add_rms_norm_torch.add_rms_norm(x, residual, weight, EPS, gemma=gemma, total=places[1])
    assert_near(same, normed(total, weight, gemma))
    assert torch.equal(residual, before)
    assert torch.equal(places[0], stream)
    assert torch.equal(places[1], total)


def test_norm_keeps_leading_dimensions_and_rounds_like_the_reference() -> None:
    x, weight = randn(2, 3, 64, dtype=torch.float16), randn(64, dtype=torch.float16, seed=1)
    actual, expected = rms_norm(x, weight, EPS), rms_norm_torch.rms_norm(x, weight, EPS)
    # a last-bit difference of the scale turns a rounding here and there
    assert (actual != expected).sum() <= 2
    assert_near(actual, expected)


@pytest.mark.parametrize(("rows", "width"), [(1, 15), (2, 16), (3, 17)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_row_have_norms_of_their_own(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, 3, width, dtype=dtype), randn(3, width, dtype=dtype, seed=1)
    expected = torch.stack([normed(x[:, i], weight[i], False) for i in range(3)], dim=1)
    assert_near(rms_norm(x, weight, EPS), expected)
    assert_near(rms_norm_torch.rms_norm(x, weight, EPS), expected)
    with pytest.raises(ValueError, match="not contiguous rows"):
        rms_norm(x[:, :2], weight, EPS)


def test_norms_refuse_other_shapes() -> None:
    x, weight = randn(2, 8), randn(8)
    with pytest.raises(ValueError, match=r"not contiguous rows of \(8,\)"):
        rms_norm(randn(2, 9), weight, EPS)
    with pytest.raises(ValueError, match=r"not contiguous rows of \(8,\)"):
        rms_norm(randn(8, 8).t(), weight, EPS)
    with pytest.raises(ValueError, match=r"\(3, 8\) is not 2 contiguous rows of 8"):
        add_rms_norm(x, randn(3, 8), weight, EPS)


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """float64 pairs (i, i + D/2) turned as complex numbers; x [T, heads, D], angle [T, D/2]."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def rope_case(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, options: str, pdl: bool
) -> None:
    """One random case; options name what is present: b(ias), q, k."""
    width, slots, table = (heads + 2 * kv_heads) * dim, tokens + 5, 37
    qkv = randn(tokens, width, dtype=dtype)
    bias = randn(width, dtype=dtype, seed=1) if "b" in options else None
    q_norm = randn(dim, dtype=dtype, seed=2) if "q" in options else None
    k_norm = randn(dim, dtype=dtype, seed=3) if "k" in options else None
    angles = (randn(table, dim // 2, seed=4) * 3).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    generator = torch.Generator().manual_seed(tokens)
    positions = torch.randint(table, (tokens,), generator=generator).to(DEVICE)
    kv_slots = torch.randperm(slots, generator=generator)[:tokens].to(DEVICE)

    wide = qkv.double() + (0 if bias is None else bias.double())
    wide = wide.view(tokens, heads + 2 * kv_heads, dim)
    query, key, value = torch.split(wide, [heads, kv_heads, kv_heads], dim=1)
    query = query if q_norm is None else normed(query, q_norm, False)
    key = key if k_norm is None else normed(key, k_norm, False)
    angle = angles[positions]
    expected = [rotated(query, angle), rotated(key, angle), value]

    def outcome(on_gpu: bool) -> list[torch.Tensor]:
        # one pool [2, slots, kv heads, D], poisoned
        pool = qkv.new_full((2, slots, kv_heads, dim), math.nan)
        args = (q_norm, k_norm, EPS, cos, sin, positions, kv_slots, *pool, heads, kv_heads)
        if on_gpu:
            new = qk_norm_rope_write(padded(qkv), *args, bias=bias, pdl=pdl)
        else:
            new = qk_rope_write_torch.qk_norm_rope_write(qkv, *args, bias=bias)
        others = torch.ones(slots, dtype=torch.bool, device=DEVICE)
        others[kv_slots] = False
        assert pool[:, others].isnan().all()
        return [new, *pool[:, kv_slots]]

    for on_gpu in (True, False):
        for actual, right in zip(outcome(on_gpu), expected, strict=True):
            assert actual.dtype == dtype
            assert_near(actual, right)


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("options", ["", "b", "q", "k", "qk", "bqk"])
def test_rope_write_options(options: str, pdl: bool) -> None:
    rope_case(2, 4, 2, 16, torch.float32, options, pdl)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 120, 128, 256])
def test_rope_write_head_dimensions(dim: int, dtype: torch.dtype) -> None:
    rope_case(2, 3, 1, dim, dtype, "bqk", False)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rope_write_token_counts(tokens: int) -> None:
    rope_case(tokens, 1, 1, 8, torch.float32, "qk", False)


@pytest.mark.parametrize(("few", "heads"), [(1, 1), (1, 2), (1, 3), (0, 13), (0, 14), (0, 15)])
def test_rope_write_heads_around_both_tiles(
    few: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qk_rope_write_gpu, "_FEW_TOKENS", few)
    rope_case(1, heads, 1, 8, torch.float32, "qk", False)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_rope_write_large(tokens: int) -> None:
    for dtype in DTYPES:
        rope_case(tokens, 32, 8, 128, dtype, "bqk", True)


def test_padding_tokens_may_share_a_slot_of_the_sink_page() -> None:
    pool = torch.full((2, 4, 1, 8), math.nan, device=DEVICE)
    qkv, positions = randn(3, 24), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    cos, sin = torch.ones(1, 4, device=DEVICE), torch.zeros(1, 4, device=DEVICE)
    qk_norm_rope_write(qkv, None, None, EPS, cos, sin, positions, positions, pool[0], pool[1], 1, 1)
    assert pool[:, 1:].isnan().all()
    assert pool[:, 0].isfinite().all()


def test_rope_write_refuses_other_shapes() -> None:
    table, index = randn(4, 4), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    pool = randn(2, 4, 2, 8)
    with pytest.raises(ValueError, match="not contiguous rows of 3"):
        qk_norm_rope_write(
            randn(1, 48), None, None, EPS, table, table, index, index, pool[0], pool[1], 3, 2
        )
    with pytest.raises(ValueError, match="not contiguous slots"):
        qk_norm_rope_write(
            randn(1, 64),
            None,
            None,
            EPS,
            table,
            table,
            index,
            index,
            pool[0, :, :1, :4],
            pool[1],
            14,
            1,
        )


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (2, 511), (1, 512), (1, 513)])
def test_gated_activations_match_float64(
    rows: int, width: int, dtype: torch.dtype, pdl: bool
) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 3
    gate, up = gate_up.double().chunk(2, dim=1)
    silu = gate / (1 + torch.exp(-gate)) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    gelu = 0.5 * gate * (1 + torch.tanh(inner)) * up
    assert_near(silu_mul(padded(gate_up), pdl=pdl), silu)
    assert_near(gelu_tanh_mul(padded(gate_up), pdl=pdl), gelu)
    assert_near(silu_mul_torch.silu_mul(gate_up), silu)
    # the reference rounds twice, and in float32 its 1 + tanh(y) cancels where y is far below 0
    torch.testing.assert_close(
        silu_mul_torch.gelu_tanh_mul(gate_up).double(), gelu, rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("width", [2047, 2048, 2049])
def test_gated_activations_in_large_blocks(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silu_mul_gpu, "_FEW_ROWS", 0)
    gate_up = randn(2, 2 * width)
    assert_near(silu_mul(gate_up), silu_mul_torch.silu_mul(gate_up))


def test_gated_activations_saturate() -> None:
    gate = torch.tensor([[-200.0, -30.0, 0.0, 30.0, 200.0, math.nan]], device=DEVICE)
    for activation in (silu_mul, gelu_tanh_mul):
        actual = activation(torch.cat((gate, torch.ones_like(gate)), dim=1))[0]
        assert actual[:3].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-11)
        assert actual[3:5].tolist() == [30.0, 200.0]
        assert actual[5].isnan()


def test_gated_activations_refuse_odd_rows() -> None:
    with pytest.raises(ValueError, match="two equal halves"):
        silu_mul(randn(2, 9))
    with pytest.raises(ValueError, match="two equal halves"):
        gelu_tanh_mul(randn(8, 8).t())


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 64, 65, 4097])
def test_embedding_rows(width: int, dtype: torch.dtype, pdl: bool) -> None:
    table = randn(7, width, dtype=dtype)
    ids = torch.tensor([3, 6, 0, 0, 7, -1, 2**40, -(2**62)], device=DEVICE)
    expected = table[torch.tensor([3, 6, 0, 0, 0, 0, 0, 0], device=DEVICE)]
    assert torch.equal(embed(ids, padded(table), pdl=pdl), expected)
    assert torch.equal(embedding_torch.embed(ids, table), expected)
    out = padded(torch.full_like(expected, math.nan))
    assert embed(ids, table, out=out, pdl=pdl) is out
    assert torch.equal(out, expected)
    assert embed(ids[:0], table).shape == (0, width)


def test_embedding_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"out \(1, 4\) is not 2 contiguous rows of 4"):
        embed(torch.zeros(2, dtype=torch.int64, device=DEVICE), randn(3, 4), out=randn(1, 4))
    with pytest.raises(ValueError, match="no contiguous ids and rows"):
        embed(torch.zeros(1, dtype=torch.int64, device=DEVICE), randn(0, 4))
    with pytest.raises(ValueError, match="no contiguous ids and rows"):
        embed(torch.zeros(4, dtype=torch.int64, device=DEVICE)[::2], randn(2, 4))
