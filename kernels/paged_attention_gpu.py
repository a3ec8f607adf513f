"""Ragged attention over paged KV on the GPU: decode, verify and prefill in one Triton kernel.

The query positions of a row and the query heads of one KV head form the M axis of a tile, so that a
split reads each key and value once whatever the draft length. A row's keys are divided into
``splits`` ranges at run time; with more than one, partial results in float32 are merged by a second
kernel.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_LOG2E = tl.constexpr(math.log2(math.e))
_DEFAULT_PROCESSORS = 132
_STREAMING_ROWS = 64  # packed rows up to which a tile is bound by memory, not by its products


class Tiling(NamedTuple):
    """How one call is cut: tile rows and keys, launch options, ranges of keys per row."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int


def choose_tiling(
    rows: int,
    kv_heads: int,
    packed_rows: int,
    block_d: int,
    itemsize: int,
    max_kv: int,
    processors: int = _DEFAULT_PROCESSORS,
    packed_tokens: int | None = None,
) -> Tiling:
    """Tiles for ``rows`` rows of up to ``packed_rows`` = max_q * group tile rows each.

    ``packed_tokens``: of all rows together, if they are packed (see ``paged_attention``).
    ``block_d``: padded head dimension, ``itemsize``: bytes of an element, ``max_kv``: bound of the
    rows' lengths. Depends on shapes alone, so a captured graph keeps its choice.
    """
    wide = block_d > 128
    if itemsize == 4:
        # Exact float32 products run without tensor cores, out of registers.
        block_m, block_n, warps = (16, 16, 4) if packed_rows <= 16 else (32, 16, 8)
    elif packed_rows <= _STREAMING_ROWS:
        block_m, block_n, warps = max(16, triton.next_power_of_2(packed_rows)), 64, 4
    else:
        block_m, block_n, warps = 128, 64, 8
    if wide:
        block_n = min(block_n, 32)
    tiles = _tiles(rows, packed_rows, packed_tokens, block_m)
    programs = kv_heads * (rows * tiles if packed_tokens is None else tiles)
    wanted = processors // max(programs, 1)
    splits = max(1, min(wanted, triton.cdiv(max_kv, 2 * block_n), 64))
    stages = 3
    if packed_rows <= 16 and programs > processors:
        # Where rows alone fill the chip, less shared memory a program lets more of them run.
        stages = 2 if programs > 3 * processors else 4
    elif packed_rows <= 16 and not wide and itemsize < 4 and splits >= 8:
        # Half of the multiprocessors do as well, and the others hold weights of the next matmul.
        block_n, stages, splits = 128, 2, splits // 2
    return Tiling(block_m, block_n, warps, stages, splits)


def _tiles(rows: int, packed_rows: int, packed_tokens: int | None, block_m: int) -> int:
    """Tiles of a row, or of all rows if they are packed: a row may fill its last one in part."""
    if packed_tokens is None:
        return -(-packed_rows // block_m)
    return packed_tokens // block_m + rows


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    tree_bits: torch.Tensor,
    is_tree: torch.Tensor,
    page_size: int,
    scale: float,
    window: int,
    *,
    max_q: int,
    max_tokens: int | None = None,
    slots: torch.Tensor | None = None,
    max_kv: int | None = None,
    num_splits: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
    clear: bool = True,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention output [T, heads, head_dim]; the arguments are the reference's, and:

    ``max_q``: static bound of a row's query length; longer rows are cut. ``max_tokens``: static
    bound of all rows' queries together, where few rows are as long as that: their tiles are then
    packed, and a program finds its row. What lies beyond the bound is cut. ``slots``
    int32/int64[R]: row r uses ``page_table[slots[r]]``. ``max_kv``: static bound of ``kv_lens``
    that the number of splits is chosen for, by default what the page table can hold. ``soft_cap``:
    scores become cap * tanh(score / cap); 0 for none. ``sinks`` float32[heads]: a further logit in
    each head's softmax denominator. ``out``: where to write. ``num_splits`` and ``tiling`` replace
    choices.
    ``pdl``: programmatic dependent launch (Hopper and later), for use inside a graph.

    Tokens at or after ``cu_q[R]`` get zeros, or are left alone without ``clear``; rows of no
    queries are skipped and may hold any slot.
    The last dimension of query, caches and out is contiguous, and both caches have one set of
    strides; ValueError otherwise. Reads nothing on the host, so calls can be captured in a graph.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = key_cache.shape[1]
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    _check(query, key_cache, value_cache, out, sinks, scale)
    rows = cu_q.shape[0] - 1
    if tokens == 0 or rows == 0:
        return out.zero_() if clear else out
    group = heads // kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    packed_tokens = None if max_tokens is None else max_tokens * group
    if tiling is None:
        tiling = choose_tiling(
            rows,
            kv_heads,
            max_q * group,
            block_d,
            query.element_size(),
            page_table.shape[1] * page_size if max_kv is None else max_kv,
            _processors(query.device),
            packed_tokens,
        )
    splits = tiling.splits if num_splits is None else num_splits
    places = rows * max_q if max_tokens is None else max_tokens
    partial, lse = _workspace(out, splits, places)
    tiles = _tiles(rows, max_q * group, packed_tokens, tiling.block_m)
    _attend_rows[(kv_heads * splits * tiles, rows if max_tokens is None else 1)](
        query, key_cache, value_cache, positions, cu_q, kv_lens, page_table, slots, tree_bits,
        is_tree, sinks, out, partial, lse, rows, splits, max_q, places, tokens if clear else 0,
        window, scale, soft_cap, query.stride(0), query.stride(1), key_cache.stride(0),
        key_cache.stride(1), out.stride(0), out.stride(1), page_table.stride(0),
        PAGE_SIZE=page_size,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=block_d,
        GROUP_BLOCK=triton.next_power_of_2(group),
        PACKED_ROWS=0 if max_tokens is None else triton.next_power_of_2(rows),
        SPLIT=splits > 1,
        HAS_WINDOW=window > 0,
        HAS_CAP=soft_cap > 0,
        # The interpreter holds bfloat16 as integers and multiplies those.
        UPCAST=query.device.type != "cuda" and query.dtype == torch.bfloat16,
        TWO_PHASE=max_q * group > _STREAMING_ROWS and window == 0,
        PDL=pdl,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        split_block = triton.next_power_of_2(splits)
        # Packed rows are as one row here: from the first one's begin to the last one's end.
        _merge_splits[(places, heads)](
            partial,
            lse,
            cu_q,
            out,
            splits,
            max_q if max_tokens is None else max_tokens,
            1 if max_tokens is None else rows,
            out.stride(0),
            out.stride(1),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            SPLIT_BLOCK=split_block,
            PDL=pdl,
            num_warps=min(4, max(1, split_block * block_d // 1024)),
            launch_pdl=pdl,
        )
    return out


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
) -> None:
    if query.shape[1] % key_cache.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads for {key_cache.shape[1]} KV heads")
    if any(tensor.stride(2) != 1 for tensor in (query, key_cache, value_cache, out)):
        raise ValueError("query, caches and out need a contiguous last dimension")
    if key_cache.stride() != value_cache.stride():
        raise ValueError("key_cache and value_cache need the same strides")
    if out.shape != query.shape:
        raise ValueError(f"out is {tuple(out.shape)}, query {tuple(query.shape)}")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ValueError(f"sinks are {tuple(sinks.shape)} for {query.shape[1]} heads")
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _workspace(
    out: torch.Tensor, splits: int, places: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Partial outputs [splits, places, heads, head_dim] and their base-2 log-sum-exps."""
    if splits == 1:
        return None, None
    shape = (splits, places, *out.shape[1:])
    partial = torch.empty(shape, dtype=torch.float32, device=out.device)
    return partial, torch.empty(shape[:-1], dtype=torch.float32, device=out.device)


@triton.jit
def _visible(
    index: tl.tensor, start: tl.tensor, kv_len: tl.tensor, bound: tl.tensor, bits: tl.tensor,
    own_position: tl.tensor, row_positions: tl.tensor, window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """bool[M, N]: keys below a query's bound, or in its tree bits, and inside the window."""
    node = index - start
    # Out-of-range shifts are undefined; keys outside the tree's 64 nodes are decided by the bound.
    in_tree = (bits[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)[None, :]) & 1
    visible = (index[None, :] < bound[:, None]) | ((in_tree != 0) & (node < 64)[None, :])
    visible = visible & (index < kv_len)[None, :]
    if HAS_WINDOW:
        own = (node >= 0) & (index < kv_len)
        position = tl.load(row_positions + node, mask=own, other=0).to(tl.int32)
        position = tl.where(own, position, index)
        visible = visible & (own_position[:, None] - position[None, :] < window)
    return visible


@triton.jit
def _load_pages(
    pages: tl.tensor, block: tl.tensor, first: tl.tensor, kv_len: tl.tensor,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Page of each key of a block, or the only one; keys outside the row repeat one inside."""
    if PAGE_SIZE % BLOCK_N == 0:
        index = tl.minimum(block, kv_len - 1)
    else:
        index = tl.minimum(tl.maximum(block + tl.arange(0, BLOCK_N), first), kv_len - 1)
    return tl.load(pages + index // PAGE_SIZE)


@triton.jit
def _attend_keys(
    acc: tl.tensor, peak: tl.tensor, total: tl.tensor, query: tl.tensor, keys: tl.tensor,
    values: tl.tensor, pages: tl.tensor, stride_slot: tl.tensor, begin: tl.tensor, end: tl.tensor,
    first: tl.tensor, start: tl.tensor, kv_len: tl.tensor, bound: tl.tensor, bits: tl.tensor,
    own_position: tl.tensor, row_positions: tl.tensor, window: tl.tensor, scale: tl.tensor,
    soft_cap: tl.tensor,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Online softmax in base 2 over keys [begin, end); begin is a multiple of BLOCK_N."""
    dim = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    # A block's pages are loaded one block ahead, so that keys never wait for the page table.
    page = _load_pages(pages, begin, first, kv_len, PAGE_SIZE, BLOCK_N)
    for block in tl.range(begin, end, BLOCK_N):
        index = block + lane
        # Hidden keys at the ends repeat a visible one: nothing outside the row's pages is read, and
        # a weight of zero never meets a NaN.
        held = tl.minimum(tl.maximum(index, first), kv_len - 1) if MASKED else index
        slot = page.to(tl.int64) * PAGE_SIZE + held % PAGE_SIZE
        page = _load_pages(pages, block + BLOCK_N, first, kv_len, PAGE_SIZE, BLOCK_N)
        offset = slot[:, None] * stride_slot + dim[None, :]
        if HEAD_DIM == BLOCK_D:
            key = tl.load(keys + offset)
        else:
            key = tl.load(keys + offset, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if HAS_CAP:
            growth = tl.exp2(score * (2 * scale * _LOG2E / soft_cap))
            score = soft_cap * (1 - 2 / (growth + 1))
            factor = _LOG2E
        else:
            factor = scale * _LOG2E
        if MASKED:
            visible = _visible(
                index, start, kv_len, bound, bits, own_position, row_positions, window, HAS_WINDOW
            )
            score = tl.where(visible, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * factor)
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        weight = tl.exp2(score * factor - origin[:, None])
        decay = tl.exp2(peak - origin)
        total = total * decay + tl.sum(weight, 1)
        if HEAD_DIM == BLOCK_D:
            value = tl.load(values + offset)
        else:
            value = tl.load(values + offset, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        weight = weight.to(value.dtype)
        if UPCAST:
            weight, value = weight.to(tl.float32), value.to(tl.float32)
        acc = tl.dot(weight, value, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def _find_tile(
    cu_q: tl.tensor, number: tl.tensor, rows: tl.tensor,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, PACKED_ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Row and tile in it of the ``number``-th tile of all; beyond them, a tile past the last."""
    lane = tl.arange(0, PACKED_ROWS)
    inside = lane < rows
    begins = tl.load(cu_q + lane, mask=inside, other=0)
    ends = tl.load(cu_q + lane + 1, mask=inside, other=0)
    counts = tl.cdiv((ends - begins) * GROUP, BLOCK_M)
    passed = inside & (tl.cumsum(counts, 0) <= number)
    row = tl.minimum(tl.sum(passed.to(tl.int32), 0), rows - 1)
    return row, number - tl.sum(tl.where(lane < row, counts, 0), 0)


@triton.jit(do_not_specialize=["rows", "splits", "max_q", "places", "clear_end", "window"])
def _attend_rows(
    query_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor, positions: tl.tensor,
    cu_q: tl.tensor, kv_lens: tl.tensor, page_table: tl.tensor, slots: tl.tensor,
    tree_bits: tl.tensor, is_tree: tl.tensor, sinks: tl.tensor, out_ptr: tl.tensor,
    partial_ptr: tl.tensor, lse_ptr: tl.tensor, rows: tl.tensor, splits: tl.tensor,
    max_q: tl.tensor, places: tl.tensor, clear_end: tl.tensor, window: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor,
    stride_query: tl.tensor, stride_query_head: tl.tensor, stride_slot: tl.tensor,
    stride_kv_head: tl.tensor, stride_out: tl.tensor, stride_out_head: tl.tensor,
    stride_table: tl.tensor,
    PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, PACKED_ROWS: tl.constexpr, SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, UPCAST: tl.constexpr,
    TWO_PHASE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One (row, tile of packed queries, split, KV head); grid [tiles * splits * KV heads, R].

    With PACKED_ROWS, R or the next power of two, the tiles are those of all rows; grid [.., 1].
    """
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS % splits
    # The last tile of a causal row is the longest: started first, it does not end alone.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // (KV_HEADS * splits)
    row = tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    clears, cleared, clearing = (split == 0) & (tile == 0), row, rows
    if PACKED_ROWS:
        clears, cleared = split == 0, tile
        clearing = tl.num_programs(0) // (KV_HEADS * splits)
        row, tile = _find_tile(cu_q, tile, rows, GROUP, BLOCK_M, PACKED_ROWS)
    if clears:
        group_head = tl.arange(0, GROUP_BLOCK)
        zero = tl.zeros((GROUP_BLOCK, BLOCK_D), dtype=out_ptr.dtype.element_ty)
        inside = (group_head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        head = kv_head * GROUP + group_head
        for token in tl.range(tl.load(cu_q + rows) + cleared, clear_end, clearing):
            target = out_ptr + token * stride_out
            tl.store(target + head[:, None] * stride_out_head + dim[None, :], zero, mask=inside)

    row_begin = tl.load(cu_q + row)
    q_len = tl.load(cu_q + row + 1) - row_begin
    if tile * BLOCK_M >= q_len * GROUP:
        return
    kv_len = tl.load(kv_lens + row)
    start = kv_len - q_len
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    real = node < tl.minimum(q_len, max_q)
    place = row * max_q + node
    if PACKED_ROWS:
        place = row_begin - tl.load(cu_q) + node
        real = real & (place < places)
    token = (row_begin + node).to(tl.int64)
    own_position = tl.load(positions + token, mask=real, other=0).to(tl.int32)
    tree = tl.load(is_tree + row) != 0
    bits = tl.load(tree_bits + token, mask=real & tree, other=0)
    bound = tl.where(tree, start, start + node + 1)

    last_node = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, q_len - 1)
    end = tl.where(tree, kv_len, start + last_node + 1)
    first = 0
    if HAS_WINDOW:
        oldest = tl.min(tl.where(real, own_position, 0x7FFFFFFF), 0)
        first = tl.minimum(tl.maximum(oldest - window + 1, 0), start)
    begin = first // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), splits) * BLOCK_N
    begin = begin + split * span
    end = tl.minimum(end, begin + span)
    occupied = begin < end

    inside = real[:, None] & (dim < HEAD_DIM)[None, :]
    source = query_ptr + token[:, None] * stride_query + head[:, None] * stride_query_head
    query = tl.load(source + dim[None, :], mask=inside, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * _LOG2E
        peak = tl.where(split == 0, sink, peak)
        total += tl.where(split == 0, 1.0, 0.0)
    table_row = row
    if slots is not None:
        table_row = tl.load(slots + row)
    pages = page_table + table_row.to(tl.int64) * stride_table
    keys = key_ptr + kv_head * stride_kv_head
    values = value_ptr + kv_head * stride_kv_head
    row_positions = positions + row_begin
    if TWO_PHASE:
        shared = tl.where(tree, start, start + tile * BLOCK_M // GROUP + 1)
        shared = tl.maximum(tl.minimum(shared // BLOCK_N * BLOCK_N, end), begin)
        acc, peak, total = _attend_keys(
            acc, peak, total, query, keys, values, pages, stride_slot, begin, shared, first,
            start, kv_len, bound, bits, own_position, row_positions, window, scale, soft_cap,
            PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D, HAS_WINDOW, HAS_CAP, UPCAST, MASKED=False,
        )  # fmt: skip
        begin = shared
    acc, peak, total = _attend_keys(
        acc, peak, total, query, keys, values, pages, stride_slot, begin, end, first,
        start, kv_len, bound, bits, own_position, row_positions, window, scale, soft_cap,
        PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D, HAS_WINDOW, HAS_CAP, UPCAST, MASKED=True,
    )  # fmt: skip

    seen = total != 0  # a NaN was seen
    total = tl.where(seen, total, 1.0)
    acc = acc / total[:, None]
    if not SPLIT:
        target = out_ptr + token[:, None] * stride_out + head[:, None] * stride_out_head
        tl.store(target + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        place = (split * places + place).to(tl.int64) * (KV_HEADS * GROUP) + head
        lse = tl.where(seen, peak + tl.log2(total), float("-inf"))
        tl.store(lse_ptr + place, lse, mask=real)
        # Splits that saw nothing leave their part unwritten: the merge skips it by its lse.
        if occupied:
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["splits", "max_q", "stride_cu"])
def _merge_splits(
    partial_ptr: tl.tensor, lse_ptr: tl.tensor, cu_q: tl.tensor, out_ptr: tl.tensor,
    splits: tl.tensor, max_q: tl.tensor, stride_cu: tl.tensor, stride_out: tl.tensor,
    stride_out_head: tl.tensor,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Weigh the splits of one (row, query position, head); grid [R * max_q, heads]."""
    row = tl.program_id(0) // max_q
    node = tl.program_id(0) % max_q
    head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(cu_q + row * stride_cu)
    if node >= tl.load(cu_q + (row + 1) * stride_cu) - begin:
        return
    token = (begin + node).to(tl.int64)
    split = tl.arange(0, SPLIT_BLOCK)
    dim = tl.arange(0, BLOCK_D)
    place = (split * tl.num_programs(0) + tl.program_id(0)) * HEADS + head
    place = place.to(tl.int64)
    lse = tl.load(lse_ptr + place, mask=split < splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    inside = (weight != 0)[:, None] & (dim < HEAD_DIM)[None, :]
    part = tl.load(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    target = out_ptr + token * stride_out + head * stride_out_head + dim
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
