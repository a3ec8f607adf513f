"""Drafts from a row's own text on a GPU, one program a row.

A program walks its text from the end in blocks of candidate ends; a block's lanes compare
backwards together until none still matches, mostly after one or two tokens. A match of the greatest
length ends the search.
"""

import torch
import triton
import triton.language as tl

_MOST_LANES = 4096


def suffix_match(
    history: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor,
    caps: torch.Tensor,
    least: int,
    most: int,
    *,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    proposed: torch.Tensor,
    depths: torch.Tensor,
) -> None:
    """Draft a chain for each of R rows that may have drafts, see the reference."""
    rows, columns = slots.shape[0], history.shape[1]
    if rows:
        block = min(_MOST_LANES, max(64, triton.next_power_of_2(columns)))
        _suffix_match_kernel[(rows,)](
            history,
            slots,
            seq_lens,
            cu_q,
            caps,
            tokens,
            parents,
            proposed,
            depths,
            columns,
            history.stride(0),
            LEAST=least,
            MOST=most,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
        )


@triton.jit
def _suffix_match_kernel(
    history: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    cu_q: tl.tensor,
    caps: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    proposed: tl.tensor,
    depths: tl.tensor,
    columns: tl.tensor,
    history_stride: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    cap = tl.load(caps + row)
    drafts = 0
    if cap > 0:
        slot = tl.load(slots + row).to(tl.int64)
        text = history + slot * history_stride
        count = tl.minimum(tl.load(seq_lens + slot) + 1, columns)
        best, end = _match_end(text, count, LEAST, MOST, BLOCK)
        found = best >= LEAST
        drafts = tl.where(found, cap, 0)
        lane = tl.arange(0, 64)
        place = tl.load(cu_q + row) + 1 + lane
        drafted = lane < cap
        cycle = tl.maximum(count - end, 1)
        token = tl.load(text + end + lane % cycle, mask=drafted & found, other=0)
        tl.store(tokens + place, token, mask=drafted)
        tl.store(parents + place, tl.where(found, lane, -1), mask=drafted)
    tl.store(proposed + row, drafts)
    tl.store(depths + row, drafts)


@triton.jit
def _match_end(
    text: tl.tensor,
    count: tl.tensor,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Length and end of the best match; a length below LEAST means that there is none."""
    best = count * 0 + LEAST - 1
    end = count * 0
    above = count  # candidate ends below are left: count - 1 down to 1
    while (above > 1) & (best < MOST):
        candidate = above - BLOCK + tl.arange(0, BLOCK)
        alive = candidate >= 1
        length = tl.zeros([BLOCK], tl.int32)
        back = 1
        while (back <= MOST) & (tl.max(alive.to(tl.int32), 0) > 0):
            # Some candidate reaches back this far, hence so does the end of the text.
            wanted = tl.load(text + count - back)
            alive = alive & (candidate >= back)
            token = tl.load(text + candidate - back, mask=alive, other=-1)
            alive = alive & (token == wanted)
            length += alive.to(tl.int32)
            back += 1
        longest = tl.max(length, 0)
        latest = tl.max(tl.where(length == longest, candidate, 0), 0)
        end = tl.where(longest > best, latest, end)
        best = tl.maximum(best, longest)
        above -= BLOCK
    return best, end


def append_tokens(
    history: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Write what R rows emitted behind their slots' text, see the reference."""
    rows, width = tokens.shape
    if rows:
        _append_kernel[(rows,)](
            history,
            slots,
            seq_lens,
            accept_lens,
            tokens,
            history.shape[1],
            history.stride(0),
            WIDTH=width,
            LANES=max(32, triton.next_power_of_2(width)),
            num_warps=1,
        )


@triton.jit
def _append_kernel(
    history: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    accept_lens: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    history_stride: tl.tensor,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    slot = tl.load(slots + row).to(tl.int64)
    count = tl.load(accept_lens + row)
    place = tl.load(seq_lens + slot) - count + 1 + lane
    emitted = lane < count
    token = tl.load(tokens + row * WIDTH + lane, mask=emitted, other=0)
    tl.store(history + slot * history_stride + place, token, mask=emitted & (place < columns))
