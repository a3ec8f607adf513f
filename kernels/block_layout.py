"""Where the blocks of block drafts stand, and the tokens that they begin with; torch references."""

import torch


def block_layout(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    bonus: torch.Tensor,
    first_row: int,
    mask_token: int,
    *,
    ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    first: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Lay out one block for each of R rows, one behind the other, in room for T tokens.

    In: slots int32[R]; caps int32[R], 0 for rows that do not draft; seq_lens int32[S]; page_table
    int32[S, P], 0 = no page; bonus int64[S]. D drafts, as many as ``places`` has, the first of them
    proposed by the block's row number ``first_row``. A block has min(D, caps[r]) + first_row rows
    and stands at positions seq_lens[slot] and after. T is enough for all.

    Out: ids int64[T], the slot's bonus token and ``mask_token`` behind it; positions, kv_slots
    int64[T]; cu_q int32[R + 1], the blocks' offsets, none of length for rows that do not draft;
    kv_lens int32[R], the last position + 1, 0 for such rows; first int64[R], the bonus tokens;
    places int64[D, R], the token that proposes draft d of row r, the last one of the block where
    there is none, and 0 of rows that do not draft. Behind all blocks ids, positions and KV slots
    are 0; a token without a page goes to page 0. Nothing is raised.
    """
    drafts, tokens = len(places), len(ids)
    device, slot = ids.device, slots.long()
    lengths = torch.where(caps > 0, caps.clamp(max=drafts) + first_row, 0)
    cu_q[0] = 0
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu_q[1:])
    first.copy_(bonus[slot])
    kv_lens.copy_(torch.where(caps > 0, seq_lens[slot] + lengths, 0))
    draft = torch.arange(drafts, device=device)[:, None] + first_row
    at = cu_q[:-1] + torch.minimum(draft, (lengths - 1).clamp(min=0))
    places.copy_(torch.where(caps > 0, at, 0))

    token = torch.arange(tokens, device=device)
    row = torch.searchsorted(cu_q[1:].contiguous(), token.int(), right=True)
    inside = row < len(slots)
    row = row.clamp(max=len(slots) - 1)
    node, of = token - cu_q[row], slot[row]
    ids.copy_(torch.where(inside, torch.where(node == 0, bonus[of], mask_token), 0))
    positions.copy_(torch.where(inside, seq_lens[of] + node, 0))
    column = positions // page_size
    paged = inside & (column < page_table.shape[1])
    pages = torch.where(paged, page_table[of, column.clamp(max=page_table.shape[1] - 1)], 0)
    kv_slots.copy_(torch.where(inside, pages * page_size + positions % page_size, 0))


def keep_newest(
    slots: torch.Tensor, accept_lens: torch.Tensor, tokens: torch.Tensor, *, bonus: torch.Tensor
) -> None:
    """Keep the newest of the tokens that each of R rows emitted.

    In: slots int32[R]; accept_lens int32[R]; tokens int32[R, W].

    Out: bonus int64[S] at the slots of rows that emitted any.
    """
    kept = accept_lens > 0
    newest = tokens.gather(1, (accept_lens - 1).clamp(min=0).long()[:, None])[:, 0].long()
    # Padding rows share a slot, and none of them emits.
    room = torch.cat((bonus, bonus.new_empty(1)))
    room[torch.where(kept, slots.long(), len(bonus))] = newest
    bonus.copy_(room[:-1])
