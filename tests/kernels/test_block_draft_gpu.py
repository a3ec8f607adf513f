"""The kernels of block drafts in Triton: interpreted on a CPU, compiled on a GPU."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from outrider.kernels import block_layout, greedy_argmax, greedy_argmax_gpu, inject_kv
from outrider.kernels import block_layout_gpu as layout_gpu
from outrider.kernels import inject_kv_gpu as inject_gpu
from outrider.kernels import markov_latent as latent
from outrider.kernels import markov_latent_gpu as latent_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-10}
PDL = [False, pytest.param(True, marks=pytest.mark.gpu)]
SLOTS, PAGES, PAGE, POISON = 9, 4, 4, -77
EPS = 1e-6


@pytest.fixture(autouse=True)
def _poison_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def ints(
    *shape: int, low: int = 0, high: int, seed: int, kind: torch.dtype = torch.int32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(DEVICE, kind)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def laid_out(module: Any, caps: list[int], drafts: int, first_row: int, room: int) -> Any:
    rows = len(caps)
    generator = torch.Generator().manual_seed(5)
    out = {
        name: torch.full((room,), POISON, dtype=torch.int64, device=DEVICE)
        for name in ("ids", "positions", "kv_slots")
    }
    for name, size in (("cu_q", rows + 1), ("kv_lens", rows)):
        out[name] = torch.full((size,), POISON, dtype=torch.int32, device=DEVICE)
    out["first"] = torch.full((rows,), POISON, dtype=torch.int64, device=DEVICE)
    out["places"] = torch.full((drafts, rows), POISON, dtype=torch.int64, device=DEVICE)
    module.block_layout(
        torch.randperm(SLOTS, generator=generator)[:rows].to(DEVICE, torch.int32),
        torch.tensor(caps, dtype=torch.int32, device=DEVICE),
        ints(SLOTS, high=PAGE * PAGES, seed=2),
        ints(SLOTS, PAGES, low=1, high=40, seed=3),
        PAGE,
        ints(SLOTS, low=1000, high=2000, seed=4, kind=torch.int64),
        first_row,
        77,
        **out,
    )
    return out


@pytest.mark.parametrize(("drafts", "first_row"), [(1, 0), (3, 0), (3, 1), (7, 1), (15, 1)])
@pytest.mark.parametrize("caps", [[0], [1], [2, 0, 40, 1], [0, 0, 3, 0, 7], [15] * 7])
def test_block_layout(caps: list[int], drafts: int, first_row: int) -> None:
    lengths = [min(cap, drafts) + first_row if cap else 0 for cap in caps]
    for spare in (0, 1, 150):
        room = sum(lengths) + spare
        one, two = (
            laid_out(module, caps, drafts, first_row, room) for module in (block_layout, layout_gpu)
        )
        for name, tensor in one.items():
            assert torch.equal(tensor, two[name]), name
        begins = one["cu_q"].tolist()
        assert [end - begin for begin, end in pairwise(begins)] == lengths
        for row, (begin, length) in enumerate(zip(begins, lengths, strict=False)):
            ids = one["ids"][begin : begin + length].tolist()
            assert ids == [int(one["first"][row]), *[77] * (length - 1)][:length]
            places = one["places"][:, row].tolist()
            real = max(length - first_row, 0)
            assert places[:real] == [begin + first_row + i for i in range(real)][: len(places)]
            last = begin + length - 1 if length else 0
            assert all(place == last for place in places[real:])
        assert not one["ids"][sum(lengths) :].any()
        assert not one["kv_slots"][sum(lengths) :].any()


def test_blocks_beyond_the_page_table_go_to_the_sink() -> None:
    for module in (block_layout, layout_gpu):
        out = laid_out(module, [15, 15, 15], 15, 1, 48)
        beyond = out["positions"] >= PAGE * PAGES
        assert beyond.any()
        assert (out["kv_slots"][beyond] < PAGE).all()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_keep_newest(rows: int) -> None:
    slots = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(1))[:rows]
    slots = torch.cat((slots, torch.full((3,), SLOTS - 1))).to(DEVICE, torch.int32)
    lens = torch.cat((ints(rows, high=4, seed=rows), torch.zeros(3, device=DEVICE).int()))
    tokens = ints(rows + 3, 3, low=100, high=900, seed=2)
    wanted = [POISON] * SLOTS
    for slot, length, row in zip(slots.tolist(), lens.tolist(), tokens.tolist(), strict=True):
        if length:
            wanted[slot] = row[length - 1]
    for module in (block_layout, layout_gpu):
        bonus = torch.full((SLOTS,), POISON, dtype=torch.int64, device=DEVICE)
        module.keep_newest(slots, lens, tokens, bonus=bonus)
        assert bonus.tolist() == wanted


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("options", ["", "b", "n", "bn"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "layers", "heads", "dim"), [(0, 1, 1, 8), (1, 1, 1, 8), (2, 3, 2, 80), (65, 2, 3, 8)]
)
def test_inject_kv(
    tokens: int, layers: int, heads: int, dim: int, dtype: torch.dtype, options: str, pdl: bool
) -> None:
    width, slots = layers * 2 * heads * dim, tokens + 4
    wide = randn(tokens, width + 8, dtype=dtype)
    bias = randn(width, dtype=dtype, seed=1) if "b" in options else None
    norms = randn(layers, dim, dtype=dtype, seed=2) if "n" in options else None
    angles = randn(37, dim // 2, seed=3) * 3
    positions = ints(tokens, high=37, seed=4, kind=torch.int64)
    places = torch.randperm(slots, generator=torch.Generator().manual_seed(5))[:tokens].to(DEVICE)
    caches = []
    for module in (inject_kv, inject_gpu):
        cache = torch.full((layers, 2, slots, heads, dim), math.nan, dtype=dtype, device=DEVICE)
        more = {"pdl": pdl} if module is inject_gpu else {}
        inject: Any = module.inject_kv
        inject(
            wide[:, :width], norms, EPS, angles.cos(), angles.sin(), positions, places, cache,
            bias=bias, **more,
        )  # fmt: skip
        others = torch.ones(slots, dtype=torch.bool, device=DEVICE)
        others[places] = False
        assert cache[:, :, others].isnan().all()
        caches.append(cache[:, :, places])
    assert_near(caches[1], caches[0], dtype)


def test_inject_kv_refuses_other_shapes() -> None:
    table, index = randn(4, 4), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    cache = randn(2, 2, 4, 1, 8)
    with pytest.raises(ValueError, match=r"not contiguous rows of 2 \* 2 \* 1 heads of 8"):
        inject_gpu.inject_kv(randn(1, 31), None, EPS, table, table, index, index, cache)
    with pytest.raises(ValueError, match="k_norms"):
        inject_gpu.inject_kv(randn(1, 32), randn(1, 8), EPS, table, table, index, index, cache)
    with pytest.raises(ValueError, match="not contiguous keys and values"):
        inject_gpu.inject_kv(randn(1, 32), None, EPS, table, table, index, index, cache[:, :, ::2])


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "rank"), [(0, 4), (1, 1), (3, 250), (2, 1025)])
def test_latents(rows: int, rank: int, dtype: torch.dtype, pdl: bool) -> None:
    gate, embedded = randn(rows, rank, dtype=dtype) * 4, randn(rows, rank, dtype=dtype, seed=1)
    wide = gate.double().sigmoid() * embedded.double()
    assert_near(latent.gated_latent(gate, embedded), wide, dtype)
    assert_near(latent_gpu.gated_latent(gate, embedded, pdl=pdl), wide, dtype)

    joint, state = randn(rows, 3 * rank, dtype=dtype) * 4, randn(rows, rank, dtype=dtype, seed=2)
    joint[:, -1] = -200.0
    keep, candidate, out = joint.double().chunk(3, dim=1)
    share = keep.sigmoid()
    moved = share * state.double() + (1 - share) * candidate.tanh()
    states = state.clone(), state.clone()
    answers = latent.rnn_latent(joint, states[0]), latent_gpu.rnn_latent(joint, states[1], pdl=pdl)
    for answer, kept in zip(answers, states, strict=True):
        assert_near(answer, out.tanh(), dtype)
        assert_near(kept, moved, dtype)


def test_latents_refuse_other_shapes() -> None:
    with pytest.raises(ValueError, match="gates"):
        latent_gpu.gated_latent(randn(2, 3), randn(2, 4))
    with pytest.raises(ValueError, match="joint"):
        latent_gpu.rnn_latent(randn(2, 9), randn(2, 4))


def chosen(row: list[float]) -> int:
    bad = [i for i, value in enumerate(row) if math.isnan(value)]
    return bad[0] if bad else row.index(max(row))


def draft_rows(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    rows = randn(6, vocab, dtype=dtype, seed=vocab)
    rows[1, [vocab // 2, vocab - 1]] = math.nan
    rows[2, vocab // 3] = math.inf
    rows[3, :] = -math.inf
    rows[4, [vocab // 3, vocab - 1]] = torch.tensor([math.inf, math.nan]).to(rows)
    return rows


@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 1024, 3001])
def test_draft_argmax(vocab: int, dtype: torch.dtype, added: bool, pdl: bool) -> None:
    logits = draft_rows(vocab, dtype)
    addend = randn(6, vocab, dtype=dtype, seed=1) if added else None
    total = logits if addend is None else logits + addend
    wanted = [chosen(row) for row in total.tolist()]
    grid = torch.full((2, 6), POISON, device=DEVICE)
    greedy_argmax.draft_argmax(logits, addend, tokens=grid[0])
    greedy_argmax_gpu.draft_argmax(logits, addend, tokens=grid[1], pdl=pdl)
    assert grid[0].tolist() == wanted
    exact = DEVICE == "cuda" or dtype != torch.bfloat16 or not added
    if exact:
        assert grid[1].tolist() == wanted
    else:  # the interpreter truncates to bfloat16
        assert grid[1, 1:5].tolist() == wanted[1:5]


def test_draft_argmax_refuses_other_shapes() -> None:
    tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="addend"):
        greedy_argmax_gpu.draft_argmax(randn(2, 8), randn(2, 9), tokens=tokens)
    with pytest.raises(ValueError, match="tokens"):
        greedy_argmax_gpu.draft_argmax(randn(3, 8), None, tokens=tokens)
