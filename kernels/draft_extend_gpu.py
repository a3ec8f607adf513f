"""A draft model's pass over what a step accepted, laid out in one Triton launch."""

import torch
import triton
import triton.language as tl

_LAST_CHUNK = tl.constexpr(1)
_VERIFY = tl.constexpr(2)
_BLOCK = 256
_MOST_BLOCKS = 32


@triton.jit
def _extend_inputs(
    slots: tl.tensor,
    kinds: tl.tensor,
    starts: tl.tensor,
    cu_q: tl.tensor,
    accept_lens: tl.tensor,
    tokens: tl.tensor,
    path: tl.tensor,
    input_ids: tl.tensor,
    prompts: tl.tensor,
    next_ids: tl.tensor,
    sources: tl.tensor,
    positions: tl.tensor,
    select: tl.tensor,
    rows: tl.tensor,
    total: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    prompts_stride: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Row program_id(0), or what lies behind all rows; the second axis shares its tokens."""
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    lane = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(cu_q + row)
    if row == rows:
        for low in range(begin + first, total, step):
            place = low + lane
            inside = place < total
            nothing = tl.zeros([BLOCK], tl.int64)
            tl.store(next_ids + place, nothing, mask=inside)
            tl.store(sources + place, place.to(tl.int64), mask=inside)
            tl.store(positions + place, nothing, mask=inside)
    else:
        end = tl.load(cu_q + row + 1)
        length = end - begin
        kind = tl.load(kinds + row).to(tl.int32)
        start = tl.load(starts + row)
        accepted = tl.load(accept_lens + row)
        verify = kind == _VERIFY
        behind = tl.load(tokens + row * width, mask=(kind == _LAST_CHUNK) & (accepted > 0), other=0)
        if prompts is not None:
            slot = tl.load(slots + row).to(tl.int64)
            column = tl.minimum(tl.maximum(start + length, 0), columns - 1)
            prompt = prompts + slot * prompts_stride + column
            going_on = (kind == 0) & (length > 0)
            behind = tl.where(going_on, tl.load(prompt, mask=going_on, other=0), behind)
        for low in range(first, length, step):
            entry = low + lane
            inside = entry < length
            place = begin + entry
            taken = inside & verify & (entry < tl.minimum(accepted, width))
            node = tl.load(path + row * width + entry, mask=taken, other=0)
            token = tl.load(tokens + row * width + entry, mask=taken, other=0)
            following = tl.load(input_ids + place + 1, mask=entry + 1 < length, other=0)
            following = tl.where(entry + 1 == length, behind.to(tl.int64), following)
            following = tl.where(taken, token.to(tl.int64), following)
            source = tl.where(taken, begin + node, place)
            tl.store(next_ids + place, following, mask=inside)
            tl.store(sources + place, source.to(tl.int64), mask=inside)
            tl.store(positions + place, (start + entry).to(tl.int64), mask=inside)
        if first == 0:
            newest = tl.where(verify, begin + accepted, end) - 1
            newest = tl.minimum(tl.maximum(newest, begin), end - 1)
            tl.store(select + row, tl.maximum(newest, 0).to(tl.int64))


def extend_inputs(
    slots: torch.Tensor,
    kinds: torch.Tensor,
    starts: torch.Tensor,
    cu_q: torch.Tensor,
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    input_ids: torch.Tensor,
    prompts: torch.Tensor | None,
    *,
    next_ids: torch.Tensor,
    sources: torch.Tensor,
    positions: torch.Tensor,
    select: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Lay R rows out again, verify rows as the chains that they accepted; see the reference.

    ``pdl``: programmatic dependent launch (Hopper and later).
    """
    rows, total = len(slots), len(input_ids)
    blocks = min(max(1, triton.cdiv(total, _BLOCK * max(rows, 1))), _MOST_BLOCKS)
    _extend_inputs[(rows + 1, blocks)](
        slots,
        kinds,
        starts,
        cu_q,
        accept_lens,
        tokens,
        path,
        input_ids,
        prompts,
        next_ids,
        sources,
        positions,
        select,
        rows,
        total,
        tokens.shape[1],
        0 if prompts is None else prompts.shape[1],
        0 if prompts is None else prompts.stride(0),
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=_BLOCK // 64,
        launch_pdl=pdl,
    )
