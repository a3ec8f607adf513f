"""The layout of a step: both kernels, the compiled bookkeeping and plain Python agree."""

import random
from types import ModuleType

import pytest
import torch

from outrider.kernels import page_updates, page_updates_gpu, step_layout, step_layout_gpu

from .step_model import (
    DEVICE,
    PREFILL,
    VERIFY,
    Compiled,
    Row,
    Slots,
    Vectors,
    make_inputs,
    plain_layout,
    random_rows,
    random_slots,
)

BOTH = pytest.mark.parametrize(
    ("module", "device"), [(step_layout, "cpu"), (step_layout_gpu, DEVICE)], ids=["torch", "gpu"]
)
TOKEN_OUTPUTS = ("input_ids", "positions", "kv_slots", "tree_bits")


def lay_out(
    module: ModuleType,
    device: str,
    rows: list[Row],
    slots: Slots,
    room: tuple[int, int] = (0, 0),
    kinds: torch.dtype = torch.uint8,
    **extras: int,
) -> Vectors:
    """Run a kernel; asserts that all padding outputs are 0 and returns the others."""
    inputs, state = make_inputs(rows, device, room, kinds), slots.tensors(device)
    out = inputs.outputs()
    module.lay_out(
        inputs.slots,
        inputs.kinds,
        inputs.starts,
        inputs.cu_q,
        inputs.host_tokens,
        inputs.host_parents,
        state["seq_lens"],
        state["last_tokens"],
        state["page_table"],
        slots.page_size,
        **out,
        **extras,
    )
    for name, before in slots.tensors(device).items():
        assert torch.equal(state[name], before)
    result = {}
    for name, tensor in out.items():
        real = len(tensor) - room[1 if name in TOKEN_OUTPUTS else 0]
        assert not tensor[real:].any(), name
        result[name] = tensor[:real].tolist()
    return result


@BOTH
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_random_plans(module: ModuleType, device: str, page_size: int) -> None:
    rng = random.Random(page_size)
    for trial in range(8):
        slots = random_slots(rng, 12, -(-110 // page_size), page_size)
        rows = random_rows(rng, rng.sample(range(12), rng.randint(1, 8)), 1000, 15)
        expected = plain_layout(rows, slots)
        assert Compiled(slots).lay_out(rows) == expected
        room = rng.choice(((0, 0), (3, 0), (0, 1), (5, 70)))
        kinds = (torch.uint8, torch.int32)[trial % 2]
        assert lay_out(module, device, rows, slots, room, kinds) == expected


@BOTH
@pytest.mark.parametrize("nodes", [1, 2, 63, 64])
def test_trees_up_to_64_nodes(module: ModuleType, device: str, nodes: int) -> None:
    """The widest, the deepest and random trees; bit 63 is the sign."""
    rng = random.Random(nodes)
    slots = random_slots(rng, 4, 30, 5)
    shapes = [
        [0] * (nodes - 1),
        list(range(nodes - 1)),
        [max(0, i - 1) for i in range(nodes - 1)],
        [rng.randint(0, i) for i in range(nodes - 1)],
    ]
    rows = [
        Row(slot, VERIFY, [rng.randrange(1000) for _ in shape], shape)
        for slot, shape in enumerate(shapes)
    ]
    expected = plain_layout(rows, slots)
    assert Compiled(slots).lay_out(rows) == expected
    assert lay_out(module, device, rows, slots, (1, 9)) == expected
    if module is step_layout_gpu:
        assert lay_out(module, device, rows, slots, (0, 65), longest=nodes) == expected


@BOTH
@pytest.mark.parametrize("length", [1, 255, 256, 257, 600])
def test_long_chunks_between_verify_rows(module: ModuleType, device: str, length: int) -> None:
    rng = random.Random(length)
    slots = random_slots(rng, 3, 80, 8)
    rows = [
        Row(2, VERIFY, [4, 5, 6], [0, 0, 2]),
        Row(0, PREFILL, [rng.randrange(1000) for _ in range(length)], start=7),
        Row(1, VERIFY, [7], [0]),
    ]
    expected = plain_layout(rows, slots)
    assert Compiled(slots).lay_out(rows) == expected
    assert lay_out(module, device, rows, slots, (2, 3)) == expected
    if module is step_layout_gpu:
        # A bound that is too small costs time, not tokens.
        assert lay_out(module, device, rows, slots, (2, 300), longest=4) == expected


@BOTH
@pytest.mark.parametrize(
    ("parents", "twin"),
    [([-1] * 4, [0, 1, 2, 3]), ([0, 1, -1, -1], [0, 1, 2, 3]), ([0, 0, -1, 1], None)],
    ids=["all", "tail", "tree"],
)
def test_padded_drafts(
    module: ModuleType, device: str, parents: list[int], twin: list[int] | None
) -> None:
    """Padding goes on as a chain; beside branches it sees itself alone."""
    slots = random_slots(random.Random(1), 2, 30, 4)
    rows = [Row(1, VERIFY, [5, 6, 0, 0], parents), Row(0, VERIFY, [], [])]
    got = lay_out(module, device, rows, slots, (1, 3))
    if twin is None:
        start = slots.seq_lens[1]
        assert got["tree_bits"][:5] == [1, 3, 5, 8, 19]
        assert got["positions"][:5] == [start + depth for depth in (0, 1, 1, 0, 2)]
        assert got["is_tree"] == [1, 0]
    else:
        rows[0].parents = twin
        assert got == plain_layout(rows, slots)


@BOTH
def test_a_step_of_padding_alone(module: ModuleType, device: str) -> None:
    slots = random_slots(random.Random(0), 2, 80, 1)
    assert not any(lay_out(module, device, [], slots, (4, 33)).values())


@BOTH
def test_an_index_without_a_page_goes_to_the_sink(module: ModuleType, device: str) -> None:
    """Unmapped pages and indices past the table alike: no write leaves page 0."""
    slots = Slots(4, [6, 3], [1, 2], [0, 0], [[6, 7], [5, 0]])
    rows = [Row(0, VERIFY, [8, 9], [0, 0]), Row(1, VERIFY, [8, 9], [0, 1])]
    assert lay_out(module, device, rows, slots)["kv_slots"] == [30, 31, 0, 23, 0, 1]


@pytest.mark.parametrize(
    ("module", "device"), [(page_updates, "cpu"), (page_updates_gpu, DEVICE)], ids=["torch", "gpu"]
)
@pytest.mark.parametrize("used", [0, 1, 127, 128, 129, 150])
def test_page_updates_stop_at_the_count(module: ModuleType, device: str, used: int) -> None:
    rng = random.Random(used)
    table = torch.full((20, 9), -3, dtype=torch.int32)
    places = rng.sample(range(table.numel()), used)
    pages = [rng.randrange(1, 1000) for _ in places]
    expected = table.clone()
    for place, page in zip(places, pages, strict=True):
        expected[place // 9, place % 9] = page
    beyond = [10**6] * (150 - used)
    columns = [
        torch.tensor([*values, *beyond], dtype=torch.int32, device=device)
        for values in ([p // 9 for p in places], [p % 9 for p in places], pages)
    ]
    table = table.to(device)
    count = torch.tensor([used], dtype=torch.int32, device=device)
    module.apply_page_updates(table, *columns, count)
    assert torch.equal(table.cpu(), expected)
    module.apply_page_updates(table, *(column[:0] for column in columns), count * 0)
    assert torch.equal(table.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [8192, 16384])
def test_a_full_prefill_beside_256_rows(length: int) -> None:
    rng = random.Random(length)
    slots = random_slots(rng, 256, 1100, 16)
    rows = random_rows(rng, list(range(1, 256)), 1000, 63)
    rows.insert(99, Row(0, PREFILL, [rng.randrange(1000) for _ in range(length)], start=900))
    assert lay_out(step_layout_gpu, DEVICE, rows, slots, (8, 100)) == plain_layout(rows, slots)
