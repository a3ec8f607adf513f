"""KV of accepted tree nodes moved side by side on a GPU; rows in place end after two loads.

Why a program may move its row's nodes front to back: an accepted path rises from node 0, so its
i-th node is at index i or above. Moving it to index i can overwrite the source of a later node k
only if that source is index i, but it is at k or above; and no source is an earlier target, so
what is read is always this step's own KV. Reading sources early is therefore harmless, and four
are in flight at a time. From the first gap on every node has one: the moves are a path's tail.
"""

import torch
import triton
import triton.language as tl

_MOST_PROGRAMS = 4096


def move_accepted(
    kv_data: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    accept_lens: torch.Tensor,
    accept_idx: torch.Tensor,
) -> None:
    """Move the KV of accepted nodes to start, start + 1, ... in ``kv_data``, see the reference.

    ``kv_data`` must be contiguous.
    """
    layers, _, kv_slots, heads, dim = kv_data.shape
    rows, width = accept_idx.shape
    if rows == 0 or width == 1:
        return
    planes = 2 * layers
    _move_kernel[(rows, min(planes, max(1, _MOST_PROGRAMS // rows)))](
        kv_data,
        slots,
        starts,
        page_table,
        accept_lens,
        accept_idx,
        planes,
        kv_slots,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        WIDTH=width,
        LANES=triton.next_power_of_2(width),
        ENTRY=heads * dim,
        BLOCK=triton.next_power_of_2(heads * dim),
        num_warps=4,
    )


@triton.jit
def _move_kernel(
    kv_data: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    page_table: tl.tensor,
    accept_lens: tl.tensor,
    accept_idx: tl.tensor,
    planes: tl.tensor,
    kv_slots: tl.tensor,
    table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    length = tl.load(accept_lens + row)
    path = accept_idx + row * WIDTH
    nodes = tl.load(path + lane, mask=(lane < length) & (lane < WIDTH), other=-1)
    in_place = tl.sum((nodes == lane).to(tl.int32), 0)
    if in_place < length:
        pages = page_table + tl.load(slots + row).to(tl.int64) * table_stride
        start = tl.load(starts + row)
        element = tl.arange(0, BLOCK)
        for plane in range(tl.program_id(1), planes, tl.num_programs(1)):
            data = kv_data + tl.cast(plane, tl.int64) * kv_slots * ENTRY + element
            for i in range(in_place, length, 4):
                a = _read(data, pages, path, start, i, length, element, PAGE_SIZE, ENTRY)
                b = _read(data, pages, path, start, i + 1, length, element, PAGE_SIZE, ENTRY)
                c = _read(data, pages, path, start, i + 2, length, element, PAGE_SIZE, ENTRY)
                d = _read(data, pages, path, start, i + 3, length, element, PAGE_SIZE, ENTRY)
                # A source of this batch may be another's target: all threads have read before.
                tl.debug_barrier()
                _write(data, a, pages, start, i, length, element, PAGE_SIZE, ENTRY)
                _write(data, b, pages, start, i + 1, length, element, PAGE_SIZE, ENTRY)
                _write(data, c, pages, start, i + 2, length, element, PAGE_SIZE, ENTRY)
                _write(data, d, pages, start, i + 3, length, element, PAGE_SIZE, ENTRY)


@triton.jit
def _place(
    pages: tl.tensor,
    index: tl.tensor,
    wanted: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
) -> tl.tensor:
    """Offset of a sequence index in a plane of the cache."""
    page = tl.load(pages + index // PAGE_SIZE, mask=wanted, other=0).to(tl.int64)
    return (page * PAGE_SIZE + index % PAGE_SIZE) * ENTRY


@triton.jit
def _read(
    data: tl.tensor,
    pages: tl.tensor,
    path: tl.tensor,
    start: tl.tensor,
    i: tl.tensor,
    length: tl.tensor,
    element: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
) -> tl.tensor:
    wanted = i < length
    node = tl.load(path + i, mask=wanted, other=0)
    source = data + _place(pages, start + node, wanted, PAGE_SIZE, ENTRY)
    return tl.load(source, mask=wanted & (element < ENTRY))


@triton.jit
def _write(
    data: tl.tensor,
    value: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    i: tl.tensor,
    length: tl.tensor,
    element: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ENTRY: tl.constexpr,
) -> None:
    wanted = i < length
    target = data + _place(pages, start + i, wanted, PAGE_SIZE, ENTRY)
    tl.store(target, value, mask=wanted & (element < ENTRY))
