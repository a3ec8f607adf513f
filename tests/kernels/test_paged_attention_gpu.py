"""The Triton attention against float64, on the GPU or in the interpreter."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from outrider.kernels.paged_attention import paged_attention as reference
from outrider.kernels.paged_attention_gpu import Tiling, choose_tiling, paged_attention

from ..reference.paged_attention_ref import visible_keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Row:
    """A row of a step: tokens before it, its own ones, and whether they form a tree.

    ``bits``: of a tree that is no tree, what its tokens see of each other, later ones too.
    """

    start: int
    count: int
    tree: bool = False
    bits: list[int] | None = None


def block(start: int, count: int, band: int = 64) -> Row:
    """A row whose tokens see each other, those less than ``band`` away."""
    bits = [sum(1 << j for j in range(count) if abs(i - j) < band) for i in range(count)]
    return Row(start, count, True, bits)


@dataclass
class Case:
    """One call and the means to compute what it should give."""

    rows: list[Row]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    page_size: int = 16
    window: int = 0
    dtype: torch.dtype = torch.float32
    soft_cap: float = 0.0
    sinks: bool = False
    slots: bool = False
    padding: int = 0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def random_tree(rng: random.Random, count: int) -> tuple[list[int], list[int]]:
    masks, depths = [1], [0]
    for node in range(1, count):
        parent = rng.randrange(node)
        masks.append(masks[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    return masks, depths


class Built:
    """Tensors of a case: caches and padding are poisoned wherever no visible token lives."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = random.Random(case.seed)
        generator = torch.Generator().manual_seed(case.seed)
        size = case.page_size
        needed = [-(-(row.start + row.count) // size) for row in case.rows]
        order = list(range(1, sum(needed) + 3))
        rng.shuffle(order)
        self.slots_of: list[list[int]] = []
        self.plans: list[tuple[int, int, int | None, list[int]]] = []
        tables, positions, bits, cu_q = [], [], [], [0]
        for number, row in enumerate(case.rows):
            pages = [order.pop() for _ in range(needed[number])]
            length = row.start + row.count if row.count else 0
            self.slots_of.append([pages[i // size] * size + i % size for i in range(length)])
            tables.append(pages)
            masks, depths = random_tree(rng, row.count) if row.tree and row.count else ([], [])
            if row.bits is not None:
                masks, depths = row.bits, list(range(row.count))
            own = [row.start + depth for depth in depths or range(row.count)]
            positions += own
            bits += [m - (1 << 64) if m >> 63 else m for m in masks] or [-1] * row.count
            self.plans += [
                (number, node, masks[node] if masks else None, own) for node in range(row.count)
            ]
            cu_q.append(cu_q[-1] + row.count)
        tokens = cu_q[-1] + case.padding
        caches = torch.full((2, (sum(needed) + 3) * size, case.kv_heads, case.dim), math.nan)
        used = torch.tensor([slot for row in self.slots_of for slot in row], dtype=torch.int64)
        shape = (2, len(used), case.kv_heads, case.dim)
        caches[:, used] = torch.randn(shape, generator=generator)
        # A query cut out of a wider projection: its rows are not adjacent.
        wide = torch.randn(tokens, case.heads + 3, case.dim, generator=generator) * 2
        wide[cu_q[-1] :] = math.nan
        self.wide = wide.to(DEVICE, case.dtype)
        self.caches = caches.to(DEVICE, case.dtype)
        self.positions = self.place([*positions, *[0] * case.padding], torch.int64)
        self.bits = self.place([*bits, *[0] * case.padding], torch.int64)
        self.cu_q = self.place(cu_q, torch.int32)
        self.kv_lens = self.place([len(slots) for slots in self.slots_of], torch.int32)
        self.is_tree = self.place([row.tree for row in case.rows], torch.uint8)
        self.sinks = torch.randn(case.heads, generator=generator) * 3 if case.sinks else None
        width = max(1, *map(len, tables))
        spread = [5 * number + 2 for number in range(len(tables))] if case.slots else None
        state = torch.full((5 * len(tables) + 2, width), 1 << 30, dtype=torch.int32)
        for number, pages in enumerate(tables):
            index = spread[number] if spread else number
            state[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.table = state.to(DEVICE)
        self.slots = self.place(spread, torch.int64) if spread else None

    @staticmethod
    def place(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    def arguments(self) -> list[Any]:
        case = self.case
        return [
            self.wide[:, 1 : case.heads + 1],
            self.caches[0],
            self.caches[1],
            self.positions,
            self.cu_q,
            self.kv_lens,
            self.table,
            self.bits,
            self.is_tree,
            case.page_size,
            case.dim**-0.5,
            case.window,
        ]

    def run(self, **options: Any) -> torch.Tensor:
        case = self.case
        tokens = self.wide.shape[0]
        out = torch.full((tokens, case.heads, case.dim), math.nan, dtype=case.dtype, device=DEVICE)
        keywords = {"max_q": max(1, *(row.count for row in case.rows)), **case.options, **options}
        sinks = None if self.sinks is None else self.sinks.to(DEVICE)
        result = paged_attention(
            *self.arguments(),
            slots=self.slots,
            soft_cap=case.soft_cap,
            sinks=sinks,
            out=out,
            **keywords,
        )
        assert result is out
        return out.double().cpu()

    def expected(self) -> torch.Tensor:
        """float64[T, heads, dim], zeros where no row is."""
        case = self.case
        query = self.wide[:, 1 : case.heads + 1].double().cpu()
        keys, values = self.caches.double().cpu()
        out = torch.zeros(query.shape, dtype=torch.float64)
        for token, (row, node, mask, own) in enumerate(self.plans):
            indices = visible_keys(case.rows[row].start, node, mask, own, case.window)
            used = [self.slots_of[row][index] for index in indices]
            for head in range(case.heads):
                kv_head = head * case.kv_heads // case.heads
                scores = keys[used, kv_head] @ query[token, head] * case.dim**-0.5
                if case.soft_cap:
                    scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
                extra = scores[:0] if self.sinks is None else self.sinks[head, None].double()
                weights = torch.cat((scores, extra)).softmax(0)[: len(used)]
                out[token, head] = weights @ values[used, kv_head]
        return out


def check(case: Case, **options: Any) -> None:
    built = Built(case)
    expected = built.expected()
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(built.run(**options), expected, atol=tolerance, rtol=tolerance)


MIXED = [Row(37, 3), Row(0, 0), Row(30, 5, tree=True), Row(0, 1), Row(0, 0)]
SMALL = Tiling(16, 16, 4, 2, 1)


@pytest.mark.parametrize(
    ("page_size", "splits"), [(1, 1), (3, 2), (16, 3), (16, 1), (32, 1), (64, 2)]
)
def test_page_sizes_and_splits(page_size: int, splits: int) -> None:
    case = Case(MIXED, page_size=page_size, slots=True, padding=7, seed=page_size)
    check(case, num_splits=splits)


@pytest.mark.parametrize("dim", [8, 80, 96, 128, 256])
def test_head_dims(dim: int) -> None:
    check(Case([Row(18, 2), Row(3, 3, tree=True)], dim=dim, seed=dim), num_splits=1 + dim // 100)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (5, 1), (10, 2)])
def test_groups_of_any_size(heads: int, kv_heads: int) -> None:
    check(Case([Row(20, 4), Row(9, 1)], heads=heads, kv_heads=kv_heads, padding=3), num_splits=1)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dtypes(dtype: torch.dtype) -> None:
    check(Case(MIXED, dtype=dtype, padding=2), num_splits=1)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_lengths_around_the_tile(length: int) -> None:
    case = Case([Row(length - 1, 1), Row(length, 2)], page_size=8)
    check(case, tiling=SMALL._replace(splits=length % 3 + 1))


@pytest.mark.parametrize("count", [7, 8, 9, 16, 17])
def test_queries_around_the_tile(count: int) -> None:
    rows = [Row(19, count), Row(0, count), Row(9, 1), Row(3, count - 1, tree=True)]
    check(Case(rows, page_size=4, padding=1, seed=count), tiling=SMALL)


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (7, 2), (16, 1), (33, 3), (1000, 1)])
def test_windows_compare_positions(window: int, splits: int) -> None:
    rows = [Row(50, 3), Row(40, 7, tree=True), Row(0, 8), Row(33, 1)]
    case = Case(rows, window=window, slots=True, sinks=window == 7, seed=window)
    check(case, tiling=SMALL._replace(splits=splits))


@pytest.mark.parametrize(
    ("soft_cap", "sinks", "splits"), [(2.0, True, 2), (0.0, True, 1), (30.0, False, 1)]
)
def test_soft_cap_and_sinks(soft_cap: float, sinks: bool, splits: int) -> None:
    check(Case(MIXED, soft_cap=soft_cap, sinks=sinks), num_splits=splits)


def test_prefill_takes_two_phases() -> None:
    rows = [Row(70, 50), Row(0, 65), Row(64, 64, tree=True), Row(130, 1)]
    check(Case(rows, heads=1, padding=5), tiling=Tiling(64, 32, 4, 2, 1))
    short = Case([Row(30, 17, tree=True)], heads=4, sinks=True, page_size=64)
    check(short, tiling=Tiling(32, 16, 4, 2, 2))


def test_full_trees_of_64_nodes() -> None:
    check(Case([Row(5, 64, tree=True)], heads=1), num_splits=1)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("splits", [1, 3])
def test_tokens_of_a_row_may_see_later_ones(splits: int, window: int) -> None:
    """Blocks around the tiles of keys and of queries, of which some reach to the other end."""
    rows = [block(15, 16), Row(7, 3), block(0, 1), block(30, 3, 2), Row(0, 0), block(9, 33, 20)]
    case = Case(rows, page_size=4, window=window, slots=True, padding=2, seed=splits)
    check(case, tiling=SMALL._replace(splits=splits))


def test_blocks_of_several_tiles_see_all_of_themselves() -> None:
    check(Case([block(20, 36), Row(3, 2)]), tiling=Tiling(32, 16, 4, 2, 2))


def test_pages_before_the_window_are_not_read() -> None:
    built = Built(Case([Row(70, 2)], window=20))
    expected = built.run()
    built.caches[:, built.slots_of[0][:51]] = math.nan
    built.table[0, :3] = 0
    assert torch.equal(built.run(), expected)


def test_agrees_with_the_torch_reference() -> None:
    built = Built(Case([Row(20, 3), Row(6, 4, tree=True)], window=9))
    result = reference(*built.arguments()).double().cpu()
    torch.testing.assert_close(built.run(), result, atol=2e-5, rtol=0)


def test_allocates_its_result_and_zeros_an_empty_batch() -> None:
    built = Built(Case([Row(4, 2)]))
    result = paged_attention(*built.arguments(), max_q=2, max_kv=6)
    assert torch.equal(result.double().cpu(), built.run())
    padded = Built(Case([Row(0, 0), Row(0, 0)], padding=5))
    assert not padded.run().any()
    arguments = padded.arguments()
    arguments[0] = arguments[0][:0]
    assert paged_attention(*arguments, max_q=1).shape == (0, 2, 64)


def test_wrong_arguments_are_named() -> None:
    built = Built(Case([Row(4, 2)], heads=4, kv_heads=2))
    wrong = [
        (0, built.wide[:, :3], "3 query heads for 2"),
        (0, built.wide[:, :4].mT.contiguous().mT, "contiguous last"),
        (1, built.caches[0].repeat(1, 2, 1)[:, ::2], "same strides"),
        (10, 0.0, "scale must be positive"),
    ]
    for index, value, message in wrong:
        arguments = built.arguments()
        arguments[index] = value
        with pytest.raises(ValueError, match=message):
            paged_attention(*arguments, max_q=2)
    with pytest.raises(ValueError, match="sinks are"):
        paged_attention(*built.arguments(), max_q=2, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="out is"):
        paged_attention(*built.arguments(), max_q=2, out=torch.zeros(1, 4, 64))


def test_tokens_behind_the_rows_can_be_left_alone() -> None:
    built = Built(Case([Row(4, 1)], padding=3))
    left = built.run(clear=False)
    assert left[1:].isnan().all()
    assert torch.equal(left[:1], built.run()[:1])


def test_the_query_bound_may_exceed_every_row() -> None:
    case = Case([Row(20, 2), Row(0, 0), Row(33, 3)], padding=2)
    check(case, max_q=5, tiling=SMALL._replace(splits=2))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("more", [0, 1, 40])
def test_tiles_of_all_rows_are_packed(splits: int, more: int) -> None:
    """Rows of no, one and several tiles in any order, of which few are as long as the bound."""
    rows = [
        Row(0, 0),
        Row(3, 9),
        Row(21, 1),
        Row(0, 0),
        Row(7, 6, tree=True),
        Row(0, 16),
        Row(0, 0),
    ]
    case = Case(rows, slots=True, padding=more // 4, seed=more + splits)
    check(case, max_q=20, max_tokens=32 + more, tiling=SMALL._replace(splits=splits))


def test_packed_rows_in_a_batchs_middle_leave_the_others_alone() -> None:
    built = Built(Case([Row(4, 3), Row(9, 5), Row(0, 0), Row(30, 18)], heads=4, kv_heads=2))
    expected, arguments = built.expected(), built.arguments()
    for position, cut in ((4, slice(1, None)), (5, slice(1, None)), (8, slice(1, None))):
        arguments[position] = arguments[position][cut]
    arguments[6] = arguments[6][1:]
    for splits in (1, 2):
        out = torch.full((26, 4, 64), math.nan, device=DEVICE)
        paged_attention(*arguments, max_q=23, max_tokens=23, out=out, num_splits=splits)
        assert out[:3].isnan().all()
        torch.testing.assert_close(out[3:].double().cpu(), expected[3:], atol=2e-5, rtol=2e-5)


def test_packed_tilings_count_tiles_of_tokens() -> None:
    apart = choose_tiling(16, 8, 2048, 128, 2, 8192)
    packed = choose_tiling(16, 2, 1024, 128, 2, 8192, packed_tokens=1024)
    assert (apart.splits, packed.splits) == (1, 2)
    assert apart.block_m == packed.block_m == 128


def test_tilings_fill_the_device_without_tiny_splits() -> None:
    assert choose_tiling(1, 8, 4, 128, 2, 2048).splits == 8
    assert choose_tiling(1, 8, 32, 128, 2, 2048).splits == 16
    assert choose_tiling(128, 8, 4, 128, 2, 8192).splits == 1
    assert choose_tiling(1, 8, 4, 128, 2, 1).splits == 1
    tiles = [choose_tiling(1, 8, rows, 128, 2, 64).block_m for rows in (1, 16, 17, 64, 65)]
    assert tiles == [16, 16, 32, 64, 128]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_large_ragged_batches(dtype: torch.dtype, dim: int, page_size: int) -> None:
    rng = random.Random(dim)
    rows = [Row(rng.randrange(900), rng.choice((1, 8, 40)), rng.random() < 0.4) for _ in range(6)]
    case = Case([*rows, Row(0, 0)], 8, 2, dim, page_size, dtype=dtype, slots=True, padding=9)
    check(case)
    check(case, pdl=True, num_splits=3)
    check(Case([Row(rng.randrange(3000), 1) for _ in range(4)], 8, 2, dim, page_size, dtype=dtype))


@pytest.mark.gpu
def test_a_captured_graph_follows_new_lengths() -> None:
    built, other = (Built(Case([Row(n, 2), Row(5, 2)], seed=n)) for n in (300, 200))
    out = torch.empty_like(built.arguments()[0].contiguous())
    paged_attention(*built.arguments(), max_q=2, max_kv=512, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(*built.arguments(), max_q=2, max_kv=512, out=out)
    width = other.table.shape[1]
    built.table[:, :width] = other.table
    for name in ("wide", "positions", "kv_lens", "bits"):
        getattr(built, name).copy_(getattr(other, name))
    built.caches[:, : other.caches.shape[1]] = other.caches
    graph.replay()
    torch.testing.assert_close(out.double().cpu(), other.expected(), atol=2e-5, rtol=0)
