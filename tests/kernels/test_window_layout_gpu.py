"""The kernels of draft windows in Triton: interpreted on a CPU, compiled on a GPU."""

from typing import Any

import pytest
import torch

from outrider.kernels import block_layout, window_layout
from outrider.kernels import window_layout_gpu as gpu

from ..reference.window_view_ref import window_view

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, TARGETS, POISON = 9, 60, -77
MODULES: tuple[Any, Any] = (window_layout, gpu)


def ints(*shape: int, low: int = 0, high: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(DEVICE, torch.int32)


def room(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=kind, device=DEVICE)


@pytest.mark.parametrize(
    ("moved", "spare", "rows"), [(0, 0, 1), (0, 5, 3), (7, 0, 4), (40, 300, 2)]
)
def test_changes_are_written(moved: int, spare: int, rows: int) -> None:
    order = torch.randperm(TARGETS, generator=torch.Generator().manual_seed(1))
    pages = torch.cat((order[:moved] + 1, torch.full((spare,), 3))).to(DEVICE, torch.int32)
    drafts = ints(moved + spare, high=30, seed=2)
    count = torch.tensor([moved], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([*range(rows), SLOTS - 1, SLOTS - 1], dtype=torch.int32, device=DEVICE)
    lows = torch.cat((ints(rows, high=100, seed=3), torch.zeros(2, device=DEVICE).int()))
    before = ints(TARGETS + 1, high=30, seed=4)
    for module in MODULES:
        table, kept = before.clone(), room(SLOTS)
        module.apply_window(table, kept, pages, drafts, count, slots, lows)
        wanted = before.tolist()
        for page, draft in zip(pages[:moved].tolist(), drafts.tolist(), strict=False):
            wanted[page] = draft
        assert table.tolist() == wanted
        middle = [POISON] * (SLOTS - 1 - rows)
        assert kept.tolist() == [*lows[:rows].tolist(), *middle, 0]


def starts_of(
    module: Any, slots: torch.Tensor, caps: torch.Tensor, lens: torch.Tensor,
    lows: torch.Tensor, window: int, page: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    starts, block_caps = room(len(slots)), room(len(slots))
    module.window_starts(
        slots, caps, lens, lows, window, page, starts=starts, block_caps=block_caps
    )
    return starts, block_caps


@pytest.mark.parametrize(
    ("page", "lengths"),
    [
        (16, {90: 90, 100: 100, 101: 101, 111: 111, 112: 112, 115: 115, 116: 100, 117: 101}),
        (16, {132: 100, 0: 0}),
        (1, {90: 90, 100: 100, 101: 100, 132: 100}),
    ],
)
def test_views_are_a_window_from_a_pages_beginning_on(page: int, lengths: dict[int, int]) -> None:
    """The numeric vectors of a window of 100 tokens (block_drafts.md 9)."""
    lens = torch.tensor([*lengths], dtype=torch.int32, device=DEVICE)
    slots = torch.arange(len(lens), dtype=torch.int32, device=DEVICE)
    for module in MODULES:
        caps = torch.ones_like(slots)
        starts, kept = starts_of(module, slots, caps, lens, torch.zeros_like(slots), 100, page)
        assert (lens - starts).tolist() == [*lengths.values()]
        assert kept.tolist() == caps.tolist()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize(("rows", "drafts", "first_row"), [(1, 3, 0), (5, 7, 1), (8, 20, 1)])
def test_blocks_stand_behind_their_views(page: int, rows: int, drafts: int, first_row: int) -> None:
    """As the reference `window_view` says, row by row."""
    window, columns, width = 21, 64 // page, drafts + 1
    generator = torch.Generator().manual_seed(rows)
    slots = torch.randperm(SLOTS, generator=generator)[:rows].to(DEVICE, torch.int32)
    caps, lens = ints(rows, high=drafts + 3, seed=1), ints(SLOTS, high=40, seed=2)
    caps[0] = drafts
    lows = torch.minimum(ints(SLOTS, high=44, seed=3), lens + 3)
    lows[slots[0]] = 0
    page_table = ints(SLOTS, columns, low=1, high=TARGETS + 1, seed=4)
    table = ints(TARGETS + 1, high=30, seed=5)
    table[0] = 0
    bonus = torch.arange(SLOTS, device=DEVICE)
    view = -(-(window + page - 1 + width) // page)
    found = []
    for module in MODULES:
        starts, kept = starts_of(module, slots, caps, lens, lows, window, page)
        total = rows * (drafts + first_row) + 70
        ids, positions, kv_slots, places = room(4, total, kind=torch.int64).unbind()
        cu_q, kv_lens = room(rows + 1), room(rows)
        block_layout.block_layout(
            slots, kept, lens, page_table, page, bonus, first_row, 77,
            ids=ids, positions=positions, kv_slots=kv_slots, cu_q=cu_q, kv_lens=kv_lens,
            first=room(rows, kind=torch.int64), places=room(drafts, rows, kind=torch.int64),
        )  # fmt: skip
        pages, plain = room(rows, view), kv_slots.clone()
        module.window_layout(
            slots, starts, cu_q, positions, page_table, table, page,
            kv_slots=kv_slots, kv_lens=kv_lens, places=places, pages=pages,
        )  # fmt: skip
        found.append((starts, kept, kv_slots, kv_lens, places, pages))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)

    wanted = window_view(
        page_table[slots.long()].cpu().numpy(), lens[slots.long()].cpu().numpy(),
        lows[slots.long()].cpu().numpy(), table.cpu().numpy(),
        window=window, page_size=page, width=width,
    )  # fmt: skip
    seen = 0
    for row in range(rows):
        begin, end = int(cu_q[row]), int(cu_q[row + 1])
        if not caps[row] or wanted.masked[row] or starts[row] > lens[slots[row]]:
            assert not kept[row]
            assert (begin, int(kv_lens[row])) == (end, 0)
            assert not pages[row].any()
            continue
        seen += 1
        assert int(starts[row]) == int(wanted.starts[row])
        length = end - begin
        assert int(kv_lens[row]) == int(wanted.context_lens[row]) + length
        used = -(-int(kv_lens[row]) // page)
        assert pages[row, :used].tolist() == wanted.pages[row, :used].tolist()
        assert not pages[row, used:].any()
        for at in range(begin, end):
            place = int(positions[at]) - int(starts[row])
            assert int(places[at]) == place
            here = int(pages[row, place // page]) * page + place % page
            assert int(kv_slots[at]) == here
    assert seen
    last = int(cu_q[-1])
    assert not places[last:].any()
    assert torch.equal(kv_slots[last:], plain[last:])


@pytest.mark.parametrize("tokens", [0, 1, 300])
@pytest.mark.parametrize("page", [1, 16])
def test_slots_are_translated(tokens: int, page: int) -> None:
    table = ints(TARGETS + 1, high=30, seed=1)
    table[0] = 0
    slots = ints(tokens, high=(TARGETS + 1) * page, seed=2).long()
    for module in MODULES:
        out = room(tokens, kind=torch.int64)
        module.draft_slots(slots, table, page, out=out)
        assert out.tolist() == [
            int(table[slot // page]) * page + slot % page for slot in slots.tolist()
        ]
