"""What a draft reads through its window, and how many pages that takes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.cython_ext.draft_window import DraftWindowSlotMap
from outrider.engine_core.draft_window import draft_pool_pages

from ..reference.window_view_ref import WindowView, window_view


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


IDENTITY = np.arange(1000, dtype=np.int32)


def view_of(
    lengths: list[int], window: int, page_size: int, width: int, lows: list[int] | None = None
) -> WindowView:
    """With a target page's number as its draft page's."""
    rows = np.arange(1, 41, dtype=np.int32) + 100 * np.arange(len(lengths), dtype=np.int32)[:, None]
    return window_view(
        rows, int32(*lengths), int32(*(lows or [0] * len(lengths))), IDENTITY,
        window=window, page_size=page_size, width=width,
    )  # fmt: skip


# Computed by hand for a window of 100 tokens in pages of 16.
SAWTOOTH = {
    90: 90, 100: 100, 101: 101, 111: 111, 112: 112, 115: 115, 116: 100, 117: 101, 132: 100,
}  # fmt: skip


def test_the_view_is_a_sawtooth() -> None:
    lengths = list(SAWTOOTH)
    view = view_of(lengths, 100, 16, 8)
    assert view.context_lens.tolist() == list(SAWTOOTH.values())
    assert (view.starts % 16 == 0).all()
    assert (view.starts + view.context_lens).tolist() == lengths
    assert not view.masked.any()
    assert all(array.dtype == np.int32 for array in view)


@pytest.mark.parametrize(("window", "page_size", "width"), [(100, 16, 8), (8, 1, 8), (3, 16, 3)])
def test_a_view_is_the_last_window_and_the_block(window: int, page_size: int, width: int) -> None:
    """Window == block, pages longer than the window, pages of one token, and short sequences."""
    for length in range(40 * page_size - width):
        view = view_of([length], window, page_size, width)
        start, count = int(view.starts[0]), int(view.context_lens[0])
        assert start <= max(0, length - window) < start + page_size
        at = np.arange(start, start + count + width)
        pages = view.pages[0][(at - start) // page_size]
        assert pages.tolist() == (at // page_size + 1).tolist()
        behind = -(-(count + width) // page_size)
        assert not view.pages[0][behind:].any()


def test_layers_with_a_shorter_window_see_the_same_keys_by_index_as_by_position() -> None:
    """A view's entry i is position start + i, so distances are what they are."""
    shorter = 5
    for length in range(1, 60):
        view = view_of([length], 8, 4, 3)
        start, count = int(view.starts[0]), int(view.context_lens[0])
        for query in range(length, length + 3):
            by_index = {start + i for i in range(count + 3) if 0 <= query - start - i < shorter}
            assert by_index == set(range(max(0, query - shorter + 1), query + 1))


def test_positions_without_draft_rows_are_left_out() -> None:
    view = view_of([20, 20, 20, 20, 22, 22], 12, 4, 2, lows=[0, 9, 16, 20, 21, 23])
    assert view.starts.tolist() == [8, 12, 16, 20, 20, 20]
    assert view.context_lens.tolist() == [12, 8, 4, 0, 2, 2]
    assert view.masked.tolist() == [0, 0, 0, 0, 2, 2]  # of a page that has but its end, or nothing
    assert view.pages[:, 0].tolist() == [3, 104, 205, 306, 406, 506]


def test_a_block_past_the_page_table_goes_to_the_sink() -> None:
    rows = int32(3, 5, 0)[None]
    view = window_view(
        rows, int32(7), int32(0), IDENTITY, window=8, page_size=4, width=8,
    )  # fmt: skip
    assert view.pages.tolist() == [[3, 5, 0, 0, 0]]


def test_pool_pages_of_the_worked_example() -> None:
    """48 requests, window 2,048, pages of 64, anchor and 15 drafts: 2,127 tokens, 34 pages each."""
    assert draft_pool_pages(48, 2048, 64, 16, overlap=False) == 48 * 34 + 1 == 1633
    assert draft_pool_pages(48, 2048, 64, 16, overlap=True) == 48 * 34 + 1
    assert draft_pool_pages(48, 2050, 64, 16, overlap=True) == 48 * 34 + 1
    assert draft_pool_pages(48, 2082, 64, 16, overlap=True) == 48 * 35 + 1


def run(pool: int, window: int, size: int, width: int, overlap: bool, offset: int) -> int:
    """Most pages that a request holds which accepts everything, plans as the scheduler does."""
    book = DraftWindowSlotMap(4000, pool, size, window, 1)
    row = np.arange(1, 4001, dtype=np.int32)
    book.attach(0, 0, row)
    book.slide(0, offset)
    book.ensure(0, 0, offset, row)
    known = length = offset
    for step in range(1, 4 * (window + size) // width + 12):
        book.begin_step(step)
        book.slide(0, known)
        book.ensure(0, known, length + width, row)
        book.check()
        if not overlap:
            book.end_step(step)
        elif step > 1:
            book.end_step(step - 1)
        known = length + width if not overlap else length
        length += width
    assert book.stats().alloc_failures == 0
    return book.stats().high_water


SHAPES = [(8, 1, 3), (8, 4, 3), (5, 2, 5), (9, 16, 2), (16, 3, 7), (33, 8, 8), (6, 4, 1)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("window", "size", "width"), SHAPES)
def test_the_pool_is_as_large_as_it_must_be(
    window: int, size: int, width: int, overlap: bool
) -> None:
    pool = draft_pool_pages(1, window, size, width, overlap)
    most = max(run(pool, window, size, width, overlap, offset) for offset in range(2 * size))
    assert most == pool - 1


def test_a_long_context_costs_no_more_than_its_window() -> None:
    window, size, width = 256, 16, 8
    book = DraftWindowSlotMap(7000, 100, size, window, 1)
    row = np.arange(1, 7001, dtype=np.int32)
    book.attach(0, 0, row)
    prompt = 100_000
    book.slide(0, prompt)
    for start in range(0, prompt, 8192):
        book.ensure(0, start, min(prompt, start + 8192), row)
    for length in range(prompt, prompt + 2000, 3):
        book.slide(0, length)
        book.ensure(0, length, length + width, row)
    assert book.stats().alloc_failures == 0
    assert book.stats().high_water <= draft_pool_pages(1, window, size, width, False) - 1
    low = int(book.lows(int32(0))[0])
    assert length - window - size < low <= length - window
    assert np.count_nonzero(book.table) == book.stats().live_pages


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="max_running_requests is 0"):
        draft_pool_pages(0, 8, 1, 1, False)
    with pytest.raises(ValueError, match="page_size is 0"):
        draft_pool_pages(1, 8, 0, 1, False)
    with pytest.raises(ValueError, match="window is 7: it must be at least the width of a step, 8"):
        draft_pool_pages(1, 7, 1, 8, False)
