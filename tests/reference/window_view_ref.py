"""What a draft reads through its window, row by row, as the host could compute it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class WindowView(NamedTuple):
    """What a draft of R rows reads: the last window of committed slots and its own block.

    ``starts`` int32[R]: position of a row's first entry, at a page's beginning. ``context_lens``
    int32[R]: committed positions from there on; the block follows, so that entry i is position
    start + i. ``masked`` int32[R]: leading entries that have no draft KV and must not be read: all
    committed ones of a row none of whose pages has it whole, else 0. ``pages`` int32[R, n]: draft
    pages of the entries, 0 (the sink) behind the block and where a page is missing.
    """

    starts: I32
    context_lens: I32
    masked: I32
    pages: I32


def window_view(
    page_rows: I32,
    lengths: I32,
    lows: I32,
    table: I32,
    *,
    window: int,
    page_size: int,
    width: int,
) -> WindowView:
    """The view of R rows, which shares no memory with what it is made of.

    ``page_rows`` int32[R, C]: target pages in sequence order, 0 where there is none. ``lengths``
    int32[R]: committed tokens. ``lows`` int32[R] and ``table``: see ``DraftWindowSlotMap``.

    A view begins with the page in which the window does, or with the first whole page that has
    draft rows.
    """
    columns = page_rows.shape[1]
    aligned = np.maximum(lengths - window, 0) // page_size * page_size
    whole = -(-lows // page_size) * page_size
    starts = np.maximum(aligned, whole)
    none = starts > lengths
    starts = np.where(none, lengths // page_size * page_size, starts)
    context_lens = lengths - starts
    count = -(-(window + page_size - 1 + width) // page_size)
    at = starts[:, None] // page_size + np.arange(count, dtype=np.int32)
    end = lengths + width
    inside = (at * page_size < end[:, None]) & (at < columns)
    targets = np.take_along_axis(page_rows, np.minimum(at, columns - 1), axis=1)
    return WindowView(
        starts=starts,
        context_lens=context_lens,
        masked=np.where(none, context_lens, 0).astype(np.int32),
        pages=np.where(inside, table[targets], 0).astype(np.int32),
    )
