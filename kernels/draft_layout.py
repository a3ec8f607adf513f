"""Where the tokens of draft passes stand, and where their KV goes; torch operations."""

import torch


def chain_layout(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    *,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    """Lay out N passes over R rows of one token each; pass i stands at seq_lens[slot] + i.

    In: slots, caps int32[R], 0 for rows that do not draft; seq_lens int32[S]; page_table
    int32[S, P], 0 = no page.

    Out: positions, kv_slots int64[N, R]; kv_lens int32[N, R] = position + 1. A token without a
    page goes to page 0. Rows that do not draft have position 0, KV slot 0 and length 1. Nothing is
    raised.
    """
    passes = torch.arange(len(positions), device=slots.device)[:, None]
    drafts = caps > 0
    positions.copy_(torch.where(drafts, seq_lens[slots.long()] + passes, 0))
    kv_slots.copy_(_kv_slots(slots, drafts, positions, page_table, page_size))
    kv_lens.copy_(positions + 1)


def tree_layout(
    slots: torch.Tensor,
    caps: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    width: int,
    ahead: int,
    *,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    """Lay out one pass over R rows of C tree nodes each, ``width`` of them a level.

    In: as ``chain_layout``; ``ahead``: tokens between the slot's length and the tree.

    Node m of a row has sequence index seq_lens[slot] + ahead + m and position seq_lens[slot] +
    ahead + m // width. Out: positions, kv_slots int64[R, C]; kv_lens int32[R] = the index of the
    last node + 1. A node without a page goes to page 0. Rows that do not draft have positions 0,
    KV slots 0 and length C. Nothing is raised.
    """
    node = torch.arange(positions.shape[1], device=slots.device)
    drafts = (caps > 0)[:, None]
    first = torch.where(drafts, seq_lens[slots.long()][:, None] + ahead, 0)
    index = torch.where(drafts, first + node, 0)
    positions.copy_(torch.where(drafts, first + node // width, 0))
    kv_slots.copy_(_kv_slots(slots[:, None], drafts, index, page_table, page_size))
    kv_lens.copy_(first[:, 0] + len(node))


def _kv_slots(
    slots: torch.Tensor,
    drafts: torch.Tensor,
    index: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """int64: KV slots of sequence indices; 0 where no draft is made, page 0 beyond the table."""
    column = index // page_size
    inside = drafts & (column < page_table.shape[1])
    pages = page_table[slots.long(), column.clamp(max=page_table.shape[1] - 1)]
    return torch.where(drafts, torch.where(inside, pages, 0) * page_size + index % page_size, 0)
