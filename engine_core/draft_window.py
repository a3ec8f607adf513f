"""How large a draft window's pool is.

The bookkeeping itself is compiled: ``cython_ext/draft_window.pyx``.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .config import EngineConfig


class WindowPool(NamedTuple):
    """A draft's own pool: tokens of the ``window``, and ``pages``, the sink included."""

    window: int
    pages: int


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


def view_pages(window: int, page_size: int, width: int) -> int:
    """Pages of a view, at most: of the window from its page's beginning on, and of the block."""
    return _pages(window + page_size - 1 + width, page_size)


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
