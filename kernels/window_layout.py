"""What a draft with a window's pool reads and writes of it; torch references.

``table`` int32[N + 1]: the draft's page of each of the target's N pages, 0, the sink, where it has
none. ``page_table`` int32[S, P]: the target's pages of S slots.
"""

import torch


def apply_window(
    table: torch.Tensor,
    lows: torch.Tensor,
    pages: torch.Tensor,
    drafts: torch.Tensor,
    count: torch.Tensor,
    slots: torch.Tensor,
    row_lows: torch.Tensor,
) -> None:
    """Set table[pages[i]] = drafts[i] for i < count[0], and lows[slots[r]] = row_lows[r].

    ``pages``, ``drafts`` int32[D]; ``count`` int32[1], at most D; ``lows`` int32[S]; ``slots``,
    ``row_lows`` int32[R]. A page may be named once; a slot that is named more often has one of the
    values. The host has checked the ranges: nothing is raised.
    """
    used = int(count[0])
    table[pages[:used].long()] = drafts[:used]
    lows[slots.long()] = row_lows


def window_starts(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    lows: torch.Tensor,
    window: int,
    page_size: int,
    *,
    starts: torch.Tensor,
    block_caps: torch.Tensor,
) -> None:
    """Where the views of R rows begin, and which rows have one.

    In: slots, caps int32[R]; seq_lens, lows int32[S], committed tokens and the first of them with
    draft KV. Out: starts int32[R], the beginning of the page in which the last ``window`` tokens
    begin, or of the first whole page with draft KV; block_caps int32[R], caps without those of rows
    in which no page begins so late.
    """
    slot = slots.long()
    lengths = seq_lens[slot]
    aligned = (lengths - window).clamp(min=0) // page_size * page_size
    whole = (lows[slot] + page_size - 1) // page_size * page_size
    starts.copy_(torch.maximum(aligned, whole))
    block_caps.copy_(torch.where(starts <= lengths, caps, 0))


def window_layout(
    slots: torch.Tensor,
    starts: torch.Tensor,
    cu_q: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
    *,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
    places: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """Turn blocks over whole sequences into blocks over the views that begin at ``starts``.

    In: slots, starts int32[R]; cu_q int32[R + 1] and positions int64[T] of the blocks, see
    `block_layout.block_layout`. Changed: kv_slots int64[T] into the draft's own; kv_lens int32[R]
    into those of the views, 0 of rows without a block.

    Out: places int64[T], indexes in the view; pages int32[R, V], the draft's pages of the view, 0
    behind it. Behind all blocks places are 0 and KV slots stay. Nothing is raised.
    """
    rows, columns = pages.shape
    token = torch.arange(len(positions), device=positions.device)
    row = torch.searchsorted(cu_q[1:].contiguous(), token.int(), right=True)
    inside = row < rows
    row = row.clamp(max=max(rows - 1, 0))
    places.copy_(torch.where(inside, positions - starts[row], 0))
    kv_slots.copy_(torch.where(inside, _translated(kv_slots, table, page_size), kv_slots))
    first = starts.long()[:, None] // page_size
    at = first + torch.arange(columns, device=starts.device)
    read = (at * page_size < kv_lens[:, None]) & (at < page_table.shape[1])
    targets = page_table[slots.long()].gather(1, at.clamp(max=page_table.shape[1] - 1))
    pages.copy_(torch.where(read, table[targets.long()], 0))
    kv_lens.copy_((kv_lens - starts).clamp(min=0))


def draft_slots(
    kv_slots: torch.Tensor, table: torch.Tensor, page_size: int, *, out: torch.Tensor
) -> None:
    """Out: int64[T], the draft's KV slots of the target's, ``kv_slots`` int64[T]."""
    out.copy_(_translated(kv_slots, table, page_size))


def _translated(kv_slots: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    return table[kv_slots // page_size].long() * page_size + kv_slots % page_size
