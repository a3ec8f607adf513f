"""Forced acceptance: kernel and reference against plain Python, then through the walk."""

import random
from types import ModuleType

import pytest
import torch

from outrider.kernels import force_accept, force_accept_gpu, step_layout, verify_walk

from .step_model import (
    DEVICE,
    VERIFY,
    Row,
    Slots,
    make_inputs,
    plain_layout,
    random_drafts,
    random_rows,
    random_slots,
)

BOTH = pytest.mark.parametrize(
    ("module", "device"), [(force_accept, "cpu"), (force_accept_gpu, DEVICE)], ids=["torch", "gpu"]
)
WORD = 2**64
# The first outputs of the published generator, seeded with 0 and with 1234567.
PUBLISHED = {0: 0xE220A8397B1DCDAF, 1234567: 6457827717110365317}


def split_mix(word: int) -> int:
    """The published output function of a state."""
    word = (word ^ word // 2**30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word // 2**27) * 0x94D049BB133111EB % WORD
    return word ^ word // 2**31


def plain_length(slot: int, start: int, floor: int, threshold: int) -> int:
    word = split_mix((slot * 2**32 + start) * 0x9E3779B97F4A7C15 % WORD)
    return floor + (word // 2**40 < threshold)


def plain_path(row: Row, length: int) -> list[int]:
    """The first ``length`` nodes of the way to the deepest node."""
    parents, paths = row.parent_list(), [[0]]
    for node in range(1, row.length):
        paths.append([*paths[parents[node]], node])
    deepest = max(range(row.length), key=lambda node: (len(paths[node]), -node))
    return paths[deepest][:length]


def force(
    module: ModuleType,
    device: str,
    rows: list[Row],
    slots: Slots,
    targets: list[int],
    mean: tuple[int, int],
    room: tuple[int, int] = (0, 0),
) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens (poisoned before), targets, and what the walk then emits for each row."""
    inputs, layout = make_inputs(rows, device, room), plain_layout(rows, slots)
    more_rows, more_tokens = room

    def int64(values: list[int], fill: int) -> torch.Tensor:
        return torch.tensor(values + [fill] * more_tokens, dtype=torch.int64, device=device)

    starts = layout["starts_before"] + [-5] * more_rows
    flat, ids = int64(targets, 3), int64(layout["input_ids"], -7)
    tokens = torch.full_like(ids, -9)
    parents, cu_q, node_cu, of_row = (
        inputs.host_parents,
        inputs.cu_q,
        inputs.node_cu,
        inputs.slots,
    )
    start = torch.tensor(starts, dtype=torch.int32, device=device)
    module.force_accept(
        flat,
        ids,
        int64(layout["positions"], -7),
        int64(layout["tree_bits"], -7),
        parents,
        cu_q,
        node_cu,
        of_row,
        start,
        floor=mean[0],
        threshold=mean[1],
        tokens=tokens,
    )
    out = {name: tensor.cpu() for name, tensor in inputs.accepted().items()}
    state = slots.tensors("cpu")
    verify_walk.verify_walk(
        flat.cpu(),
        tokens.cpu(),
        parents.cpu(),
        cu_q.cpu(),
        node_cu.cpu(),
        of_row.cpu(),
        start.cpu(),
        state["seq_lens"],
        state["last_tokens"],
        state["out_counts"],
        **out,
    )
    emitted = [
        found[:length]
        for found, length in zip(out["tokens"].tolist(), out["accept_lens"].tolist(), strict=True)
    ]
    return tokens.tolist(), flat.tolist(), emitted[: len(rows)]


def test_the_output_function_is_the_published_one() -> None:
    for seed, expected in PUBLISHED.items():
        assert split_mix((seed + 0x9E3779B97F4A7C15) % WORD) == expected


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_rows_emit_drawn_lengths(module: ModuleType, device: str, seed: int) -> None:
    rng = random.Random(seed)
    reached = {"longer": 0, "capped": 0, "unusable": 0, "tree": 0, "plain": 0}
    for mean in ((1, 0), (2, 1 << 23), (3, 0xABCDEF), (8, 0), (70, 0)):
        slots = random_slots(rng, 8, 100, 1)
        rows = random_rows(rng, rng.sample(range(8), rng.randint(1, 8)), 50, rng.choice((7, 63)))
        targets = [
            -1 if rng.random() < 0.03 else 100 + rng.randrange(50)
            for row in rows
            for _ in range(row.nodes)
        ]
        room = rng.choice(((0, 0), (3, 40)))
        tokens, forced, emitted = force(module, device, rows, slots, targets, mean, room)
        node = token = 0
        for row, got in zip(rows, emitted, strict=True):
            wanted = targets[node : node + row.nodes]
            start = slots.seq_lens[row.slot]
            length = plain_length(row.slot, start, *mean)
            after = forced[node : node + row.nodes]
            if row.nodes < 2:
                assert after == wanted
                assert set(tokens[token : token + row.length]) == {-9}
                reached["plain"] += 1
            else:
                path = plain_path(row, length)
                drafts = [row.tokens[i - 1] for i in path[1:]]
                usable = all(wanted[i] >= 0 for i in path)
                assert got == ([*drafts, wanted[path[-1]]] if usable else [])
                expected = list(wanted)
                for before, draft in zip(path, drafts, strict=False):
                    expected[before] = draft if wanted[before] >= 0 else -1
                assert after == expected
                reached["longer"] += length > mean[0]
                reached["capped"] += len(path) < length
                reached["unusable"] += not usable
                reached["tree"] += row.parents != list(range(len(row.parents)))
            node, token = node + row.nodes, token + row.length
    assert reached["capped"]
    assert reached["tree"]
    assert reached["plain"]


@BOTH
def test_chains_of_every_width(module: ModuleType, device: str) -> None:
    rng, widths = random.Random(2), (1, 2, 31, 32, 33, 62, 63)
    slots = random_slots(rng, len(widths), 100, 1)
    rows = [random_drafts(rng, slot, width, 50, True) for slot, width in enumerate(widths)]
    for floor in (1, 2, 33, 64):
        targets = [100] * sum(row.nodes for row in rows)
        _, _, emitted = force(module, device, rows, slots, targets, (floor, 0))
        for row, got in zip(rows, emitted, strict=True):
            assert got == [*row.tokens[: floor - 1], 100]


@BOTH
def test_padding_alone_is_left_alone(module: ModuleType, device: str) -> None:
    slots = random_slots(random.Random(0), 2, 80, 1)
    tokens, targets, _ = force(module, device, [], slots, [], (2, 0), (3, 5))
    assert (tokens, targets) == ([-9] * 5, [3] * 5)


@pytest.mark.gpu
def test_kernel_and_reference_draw_alike_for_many_keys() -> None:
    rng = random.Random(6)
    slots = random_slots(rng, 4000, 300, 1)
    rows = [Row(slot, VERIFY, [1, 2, 3], [0, 1, 2]) for slot in range(4000)]
    mean = (2, 0x6789AB)
    targets = [100] * 16_000
    left = force(force_accept, "cpu", rows, slots, targets, mean)
    assert force(force_accept_gpu, DEVICE, rows, slots, targets, mean) == left
    assert 0.35 < sum(len(got) > 2 for got in left[2]) / 4000 < 0.46


@BOTH
def test_padding_is_neither_accepted_nor_written_through(module: ModuleType, device: str) -> None:
    """Laid out as a chain, padding reaches deeper than the drafts: it must not count."""
    slots = random_slots(random.Random(2), 3, 90, 1)
    rows = [
        Row(0, VERIFY, [0] * 3, [-1] * 3),
        Row(1, VERIFY, [7, 8, 0, 0], [0, 1, -1, -1]),
        Row(2, VERIFY, [0] * 3, [-1] * 3),
    ]
    inputs, state = make_inputs(rows, "cpu"), slots.tensors("cpu")
    out = inputs.outputs()
    step_layout.lay_out(
        inputs.slots, inputs.kinds, inputs.starts, inputs.cu_q, inputs.host_tokens,
        inputs.host_parents, state["seq_lens"], state["last_tokens"], state["page_table"], 1, **out,
    )  # fmt: skip
    targets = torch.full((13,), 5, dtype=torch.int64, device=device)
    tokens = torch.full((13,), -9, dtype=torch.int64, device=device)
    arrays = [out["input_ids"], out["positions"], out["tree_bits"], inputs.host_parents,
              inputs.cu_q, inputs.node_cu, inputs.slots, out["starts_before"]]  # fmt: skip
    module.force_accept(
        targets, *(array.to(device) for array in arrays), floor=5, threshold=0, tokens=tokens
    )
    assert targets.tolist() == [5] * 4 + [7, 8, 5, 5, 5] + [5] * 4
    drafted = [tokens.tolist()[a:b] for a, b in ((1, 4), (5, 9), (10, 13))]
    assert drafted == [[-1] * 3, [7, 8, -1, -1], [-1] * 3]
