"""Both implementations of ragged paged attention against a scalar reference."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from outrider.kernels import attention_cpu, native_cpu
from outrider.kernels.paged_attention import paged_attention

from ..reference.paged_attention_ref import attend, visible_keys


@dataclass
class Case:
    """Arguments of one call and the expected output."""

    tensors: list[Any]
    page_size: int
    window: int
    expected: torch.Tensor


def random_tree(rng: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    """Ancestor masks and depths."""
    masks, depths = [1], [0]
    for node in range(1, nodes):
        parent = rng.randrange(node)
        masks.append(masks[parent] | 1 << node)
        depths.append(depths[parent] + 1)
    return masks, depths


def make_case(seed: int, seen: Counter[str]) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    page_size = rng.choice((1, 3, 16, 64))
    heads, kv_heads = rng.choice(((4, 2), (3, 3), (6, 1), (8, 2)))
    dim = rng.choice((8, 24, 64, 80, 128))
    window = rng.choice((0, 0, 1, 7, 33, 50))
    rows = rng.randrange(1, 5)
    total_pages, cursor = 400 // page_size + 8, 0
    order = list(range(1, total_pages + 1))
    rng.shuffle(order)
    slots_of: list[list[int]] = []
    tables, positions, bits, cu_q, kv_lens, trees = [], [], [], [0], [], []
    plans: list[tuple[int, int, int | None, list[int]]] = []
    for row in range(rows):
        tree = rng.random() < 0.5
        count = rng.choice((1, 5, 12, 64)) if tree else rng.choice((1, 3, 12, 70))
        count = min(count, 40) if rows > 3 else count
        start = rng.choice((0, 1, 30, 31, 32, 33, 50, 64))
        length = start + count
        pages = order[cursor : cursor + -(-length // page_size)]
        cursor += len(pages)
        tables.append(pages)
        slots_of.append([pages[i // page_size] * page_size + i % page_size for i in range(length)])
        masks, depths = random_tree(rng, count) if tree else ([], list(range(count)))
        own = [start + depth for depth in depths]
        positions += own
        bits += [m - (1 << 64) if m >> 63 else m for m in masks] if tree else [0] * count
        plans += [(row, i, masks[i] if tree else None, own) for i in range(count)]
        cu_q.append(cu_q[-1] + count)
        kv_lens.append(length)
        trees.append(tree)
        seen["tree" if tree else "causal"] += 1
        seen["window"] += bool(window)
        seen["full tree"] += tree and count == 64
    width = max(len(pages) for pages in tables)
    slots = (total_pages + 1) * page_size
    query = torch.randn(cu_q[-1], heads, dim) * 2
    keys, values = torch.randn(slots, kv_heads, dim), torch.randn(slots, kv_heads, dim)
    scale = dim**-0.5
    expected = torch.stack(
        [
            attend(
                query[token],
                keys,
                values,
                slots_of[row],
                visible_keys(kv_lens[row] - len(own), node, mask, own, window),
                scale,
            )
            for token, (row, node, mask, own) in enumerate(plans)
        ]
    )
    return Case(
        [
            query,
            keys,
            values,
            torch.tensor(positions),
            torch.tensor(cu_q, dtype=torch.int32),
            torch.tensor(kv_lens, dtype=torch.int32),
            torch.tensor([p + [0] * (width - len(p)) for p in tables], dtype=torch.int32),
            torch.tensor(bits),
            torch.tensor(trees, dtype=torch.uint8),
        ],
        page_size,
        window,
        expected,
    )


def arguments(case: Case) -> list[Any]:
    """Everything of a call, in its order."""
    return [*case.tensors, case.page_size, case.tensors[0].shape[2] ** -0.5, case.window]


def run_native(case: Case, isa: str | None = None) -> torch.Tensor:
    out = torch.empty_like(case.tensors[0])
    arrays: list[Any] = [a.numpy() if isinstance(a, torch.Tensor) else a for a in arguments(case)]
    native: Any = attention_cpu.paged_attention
    native(*arrays, out.numpy(), isa=isa)
    return out


def test_both_agree_with_the_scalar_reference() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        case = make_case(seed, seen)
        ours = paged_attention(*arguments(case))
        torch.testing.assert_close(ours.double(), case.expected, atol=2e-5, rtol=0)
        answers = {isa: run_native(case, isa) for isa in native_cpu.instruction_sets()}
        for native in answers.values():
            torch.testing.assert_close(native.double(), case.expected, atol=2e-5, rtol=0)
        if "avx512" in answers:
            assert torch.equal(answers["avx512"], answers["avx2"])
    assert min(seen[name] for name in ("tree", "causal", "window", "full tree")) >= 3


def chain_case(length: int, queries: int, as_tree: bool, page_size: int = 4) -> Case:
    """The last ``queries`` of a fixed sequence of ``length`` tokens as one row."""
    torch.manual_seed(3)
    pages = torch.randperm(60)[: -(-200 // page_size)].int() + 1
    query = torch.randn(200, 4, 64)[length - queries : length].contiguous()
    keys, values = torch.randn(61 * page_size, 2, 64), torch.randn(61 * page_size, 2, 64)
    bits = [(1 << (i + 1)) - 1 for i in range(queries)] if as_tree else [0] * queries
    tensors = [
        query,
        keys,
        values,
        torch.arange(length - queries, length),
        torch.tensor([0, queries], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        pages[None],
        torch.tensor(bits),
        torch.tensor([as_tree], dtype=torch.uint8),
    ]
    return Case(tensors, page_size, 0, torch.empty(0))


def test_bits_do_not_depend_on_the_row_shape() -> None:
    alone = torch.cat([run_native(chain_case(n, 1, False)) for n in range(1, 151)])
    assert torch.equal(alone, run_native(chain_case(150, 150, False)))
    for start, count in ((0, 40), (31, 12), (32, 2), (90, 60), (149, 1)):
        for as_tree in (False, True):
            together = run_native(chain_case(start + count, count, as_tree))
            assert torch.equal(alone[start : start + count], together)


def test_tokens_of_a_row_may_see_later_ones_in_torch_alone() -> None:
    """Native keys are numbered by what comes before a token, so that blocks are refused there."""
    case = chain_case(40, 6, True)
    for masks in ([-1] * 6, [0b11, 0b111, 0b1110, 0b11100, 0b111000, 0b110000]):
        for window in (0, 4):
            block = damage(case, 7, masks)
            block.window = window
            ours = paged_attention(*arguments(block))
            pages = case.tensors[6][0].tolist()
            slots = [pages[i // 4] * 4 + i % 4 for i in range(40)]
            own = list(range(34, 40))
            for node, mask in enumerate(masks):
                keys = visible_keys(34, node, mask, own, window)
                wanted = attend(
                    case.tensors[0][node], case.tensors[1], case.tensors[2], slots, keys, 64**-0.5
                )
                torch.testing.assert_close(ours[node].double(), wanted, atol=2e-5, rtol=0)
            with pytest.raises(ValueError, match="tree_bits: node 0"):
                run_native(block)


def damage(case: Case, index: int, value: list[int]) -> Case:
    tensors = list(case.tensors)
    tensors[index] = torch.tensor(value, dtype=tensors[index].dtype).view_as(tensors[index])
    return Case(tensors, case.page_size, case.window, case.expected)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (4, [0, 3], "cu_q"),
        (5, [1], "kv_lens"),
        (5, [1000], "page_table"),
        (6, [61] * 50, "page outside"),
        (6, [-1] * 50, "page outside"),
        (7, [1, 1], "tree_bits"),
        (7, [3, 3], "tree_bits"),
    ],
)
def test_wrong_arguments_are_named(index: int, value: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_native(damage(chain_case(20, 2, True), index, value))


def test_too_large_a_tree_is_refused() -> None:
    case = chain_case(100, 65, False)
    with pytest.raises(ValueError, match="at most 64"):
        run_native(damage(case, 8, [1]))
