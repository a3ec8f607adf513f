"""KV of accepted tree nodes moved side by side, the torch reference."""

import torch


def move_accepted(
    kv_data: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    accept_lens: torch.Tensor,
    accept_idx: torch.Tensor,
) -> None:
    """Move node accept_idx[r, i] of row r from sequence index start + node to start + i.

    ``kv_data`` [layers, 2, slots, kv heads, head_dim], changed in place; ``slots`` int32[R], no
    slot twice; ``starts`` int32[R] the rows' starts before the step; ``page_table`` int32[S, P];
    ``accept_lens`` int32[R]; ``accept_idx`` int32[R, W], per row 0 and then rising, read below
    accept_lens. Rows that accepted nothing may be padding, their slot is not used. Nothing is
    raised.
    """
    for row, length in enumerate(accept_lens.tolist()):
        for i, node in enumerate(accept_idx[row, :length].tolist()):
            if node != i:
                pages = page_table[int(slots[row])]
                source, target = (
                    int(pages[place // page_size]) * page_size + place % page_size
                    for place in (int(starts[row]) + node, int(starts[row]) + i)
                )
                kv_data[:, :, target] = kv_data[:, :, source]
