"""How large a draft window's pool is, and what a draft reads of it.

The bookkeeping itself is compiled: ``cython_ext/draft_window.pyx``.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .ids import I32

if TYPE_CHECKING:
    from .config import EngineConfig


class WindowPool(NamedTuple):
    """A draft's own pool: tokens of the ``window``, and ``pages``, the sink included."""

    window: int
    pages: int


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


def window_pool(
    config: "EngineConfig", context: int, page_size: int, width: int
) -> WindowPool | None:
    """The pool that ``config`` asks for, None without a window.

    ``context``: most tokens of a request, beyond which no window reaches. ``width``: nodes that a
    verify row has at most.
    """
    if config.speculative_draft_window_size is None:
        return None
    window = max(width, min(config.speculative_draft_window_size, context))
    overlap = not config.disable_overlap_schedule
    running = config.max_running_requests
    return WindowPool(window, draft_pool_pages(running, window, page_size, width, overlap))


def draft_pool_pages(
    max_running_requests: int, window: int, page_size: int, width: int, overlap: bool
) -> int:
    """Pages of a pool in which no request ever lacks one, the sink included.

    ``width``: positions that one step writes, the block or the anchor and gamma drafts. A request
    at length P has pages from the beginning of P - window's page, up to page_size - 1 positions
    before it, to P + width: window + page_size - 1 + width positions, rounded up to pages.

    With overlap the host knows P as of the step before the one in flight: that one may have
    committed width tokens more, and when it is known that it did, the pages that slid out, width
    positions more, serve it until the next plan. Hence three widths: where pages are shorter than
    a block, one spare page would not do.
    """
    _require(max_running_requests=max_running_requests)
    _check_shape(window, page_size, width)
    positions = window + page_size - 1 + (3 if overlap else 1) * width
    return max_running_requests * _pages(positions, page_size) + 1


def view_bound(length: int, window: int, page_size: int) -> int:
    """Most committed positions in the view of a row of at most ``length`` tokens.

    The exact number, ``context_lens``, is a sawtooth in the length: the one of an upper bound may
    be less than the row's.
    """
    _check_shape(window, page_size, 1)
    return min(length, window + (page_size if page_size > 1 else 0))


def view_pages(window: int, page_size: int, width: int) -> int:
    """Pages of a view, at most: of the window from its page's beginning on, and of the block."""
    return _pages(window + page_size - 1 + width, page_size)


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
    _check_shape(window, page_size, width)
    rows, columns = page_rows.shape
    if not rows == len(lengths) == len(lows):
        raise ValueError(
            f"page_rows has {rows} rows, lengths {len(lengths)} and lows {len(lows)}: "
            "give one of each a row"
        )
    aligned = np.maximum(lengths - window, 0) // page_size * page_size
    whole = -(-lows // page_size) * page_size
    starts = np.maximum(aligned, whole)
    none = starts > lengths
    starts = np.where(none, lengths // page_size * page_size, starts)
    context_lens = lengths - starts
    count = view_pages(window, page_size, width)
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


def _pages(positions: int, page_size: int) -> int:
    return -(-positions // page_size)


def _check_shape(window: int, page_size: int, width: int) -> None:
    _require(window=window, page_size=page_size, width=width)
    if window < width:
        raise ValueError(f"window is {window}: it must be at least the width of a step, {width}")


def _require(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be 1 or more")
