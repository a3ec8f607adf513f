"""Changes to the page table, the torch reference."""

import torch


def apply_page_updates(
    page_table: torch.Tensor,
    slots: torch.Tensor,
    columns: torch.Tensor,
    pages: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Set page_table[slots[i], columns[i]] = pages[i] for i < count[0], in place.

    ``page_table`` int32[S, P]; ``slots``, ``columns``, ``pages`` int32[U]; ``count`` int32[1], at
    most U: what lies beyond it is not read. An entry may be named once. The host has checked the
    ranges: nothing is raised.
    """
    used = int(count[0])
    page_table[slots[:used].long(), columns[:used].long()] = pages[:used]
