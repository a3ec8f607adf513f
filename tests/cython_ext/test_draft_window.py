"""DraftWindowSlotMap case by case: exhaustion, sharing, steps in flight, misuse, planted damage."""

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.cython_ext.draft_window import DraftWindowSlotMap
from outrider.cython_ext.page_allocator import PageAllocator
from outrider.cython_ext.request_table import RequestTable


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def row(first: int, count: int) -> NDArray[np.int32]:
    return np.arange(first, first + count, dtype=np.int32)


def make(
    pool_pages: int = 20, page_size: int = 4, window: int = 8, target_pages: int = 40
) -> DraftWindowSlotMap:
    return DraftWindowSlotMap(target_pages, pool_pages, page_size, window, max_slots=4)


def test_pages_get_draft_pages_and_the_rest_the_sink() -> None:
    window = make()
    pages = int32(7, 3, 9)
    window.attach(0, 0, pages)
    assert window.ensure(0, 0, 10, pages) == 0
    drafts = window.table[pages]
    assert sorted(drafts) == [1, 2, 3]
    assert drafts.dtype == np.int32
    assert window.table[int32(0, 1, 39)].tolist() == [0] * 3


def test_exhaustion_is_counted_and_keeps_the_newest_positions() -> None:
    window = make(pool_pages=3)
    pages = row(1, 6)
    window.attach(0, 0, pages)
    assert window.ensure(0, 0, 16, pages) == 2
    assert window.table[pages].astype(bool).tolist() == [False] * 2 + [True] * 2 + [False] * 2
    state = window.state(0)
    assert (state.low, state.end) == (8, 16)
    stats = window.stats()
    assert (stats.alloc_failures, stats.live_pages, stats.free_pages) == (2, 2, 0)
    # Its own window's oldest page makes room: that is slid out, although nobody said so.
    assert window.ensure(0, 20, 22, pages) == 0
    state = window.state(0)
    assert (state.low, state.pages.tolist()) == (20, [6])  # 16..19 were never written
    assert window.stats().high_water == 2
    window.check()


def test_failed_positions_are_not_read_when_a_page_is_had_later() -> None:
    window = make(pool_pages=2)
    other, pages = row(30, 1), row(1, 3)
    window.attach(1, 0, other)
    window.ensure(1, 0, 1, other)
    window.attach(0, 0, pages)
    assert window.ensure(0, 0, 3, pages) == 1
    assert window.release(1) == 1
    assert window.ensure(0, 1, 4, pages) == 0
    assert window.lows(int32(0)).tolist() == [3]  # 0..2 may be in the sink
    window.attach(2, 4, pages)
    assert window.lows(int32(2)).tolist() == [3]
    window.check()


def test_release_twice_and_of_a_slot_without_a_request() -> None:
    window = make()
    pages = row(1, 3)
    window.attach(0, 0, pages)
    window.ensure(0, 0, 12, pages)
    assert window.release(0) == 3
    assert window.release(0) == 0
    assert window.release(3) == 0
    assert window.stats().live_pages == 0
    window.attach(0, 0, pages)  # the slot's next request
    window.ensure(0, 0, 4, pages)
    window.check()


def test_eviction_of_a_page_that_was_slid_out() -> None:
    window = make()
    pages = row(1, 6)
    window.attach(0, 0, pages)
    window.ensure(0, 0, 24, pages)
    window.slide(0, 20)
    assert window.table[pages].tolist()[:3] == [0, 0, 0]
    assert window.on_target_free(pages[:3]) == 0
    assert window.on_target_free(pages[:3]) == 0
    assert window.stats().live_pages == 3
    window.slide(0, 8)  # an older length changes nothing
    assert window.state(0).floor == 12


def test_a_tail_freed_mid_page_cuts_what_follows() -> None:
    window = make()
    pages = row(1, 4)
    window.attach(0, 0, pages)
    window.ensure(0, 0, 14, pages)
    assert window.on_target_free(pages[2:]) == 2  # six positions are committed
    assert window.on_target_free(pages[2:]) == 0
    assert window.state(0).end == 8
    window.check()
    again = int32(1, 2, 20, 21)
    assert window.ensure(0, 6, 14, again) == 0
    assert window.state(0).low == 0
    assert window.table[again].all()
    assert not window.table[pages[2:]].any()
    # A page in the middle takes those behind it along.
    assert window.on_target_free(int32(2)) == 3
    assert window.state(0).pages.tolist() == [1]
    window.check()


def test_no_page_is_reused_while_a_step_reads_it() -> None:
    window = make(pool_pages=4)
    mine, other = row(1, 4), row(11, 4)
    window.begin_step(1)
    window.attach(0, 0, mine)
    assert window.ensure(0, 0, 12, mine) == 0
    window.begin_step(2)
    assert window.release(0) == 3  # aborted while step 1 runs
    assert window.stats()[:3] == (0, 3, 0)
    window.attach(0, 0, other)  # the same slot
    assert window.ensure(0, 0, 4, other) == 1
    window.check()
    window.end_step(1)
    assert window.stats().free_pages == 3
    assert window.ensure(0, 0, 4, other) == 0
    with pytest.raises(RuntimeError, match="step 2 is in flight"):
        window.reset()
    window.end_step(2)
    window.reset()
    assert window.stats()[:3] == (0, 0, 3)
    assert not window.table.any()
    window.attach(0, 0, mine)
    window.check()


def test_a_slid_out_page_waits_for_the_step_that_reads_it_only() -> None:
    window = make(page_size=4, window=4)
    pages = row(1, 6)
    window.begin_step(1)
    window.attach(0, 0, pages)
    window.ensure(0, 0, 8, pages)
    window.begin_step(2)
    window.slide(0, 8)
    assert window.stats()[:2] == (1, 1)
    window.ensure(0, 8, 12, pages)
    window.end_step(1)
    assert window.stats()[:2] == (2, 0)
    window.end_step(2)
    window.begin_step(3)
    window.slide(0, 12)  # nothing of it is in flight
    assert window.stats()[:2] == (1, 0)


def test_a_prefix_without_draft_rows_fills_up_or_is_computed_again() -> None:
    window = make()
    pages = row(1, 8)
    assert window.rows_from(20, pages) == 20
    assert window.attach(0, 20, pages) == 20
    window.ensure(0, 20, 24, pages)
    assert window.state(0).low == 20
    stats = window.stats()
    assert (stats.rows_found, stats.rows_missing) == (0, 8)
    window.release(0)
    assert window.attach(0, 12, pages) == 12  # the last window is computed again
    window.slide(0, 21)
    window.ensure(0, 12, 21, pages)
    assert window.state(0).low == 12
    window.check()


def test_two_requests_share_a_prefix_until_the_last_one_leaves_it() -> None:
    window = make()
    mine = row(1, 6)
    window.attach(0, 0, mine)
    window.ensure(0, 0, 20, mine)
    window.slide(0, 17)
    fork = np.concatenate([mine[:4], row(20, 2)])
    assert window.attach(1, 16, fork) == 8
    window.ensure(1, 16, 20, fork)
    shared = window.table[mine[2:4]].copy()
    assert shared.all()
    assert window.stats().rows_found == 8
    assert window.release(0) == 1  # its own page; the prefix stays
    assert window.table[mine[2:4]].tolist() == shared.tolist()
    window.check()
    window.slide(1, 24)
    assert not window.table[mine[2:4]].any()
    assert window.release(1) == 1
    window.check()


def test_a_page_that_another_has_still_to_fill_is_no_prefix() -> None:
    """One computes a cached prefix's window again, chunk by chunk; a fork of it arrives."""
    window = make()
    pages = row(1, 4)
    window.attach(0, 8, pages)
    window.ensure(0, 8, 10, pages)
    assert window.attach(1, 12, pages) == 12
    window.release(1)
    window.ensure(0, 10, 12, pages)
    assert window.attach(1, 12, pages) == 8


def test_a_gap_hides_what_lies_before_it() -> None:
    window = make()
    pages = row(1, 4)
    window.attach(0, 0, pages)
    window.ensure(0, 0, 5, pages)
    window.ensure(0, 6, 8, pages)
    assert window.state(0).low == 6
    assert window.rows_from(8, pages) == 6
    window.check()


def test_a_page_of_one_token() -> None:
    window = make(pool_pages=5, page_size=1, window=2)
    pages = row(1, 30)
    window.attach(0, 0, pages)
    for length in range(20):
        window.slide(0, length)
        assert window.ensure(0, length, length + 2, pages) == 0
        assert np.flatnonzero(window.table[row(1, 22)]).tolist() == list(
            range(max(0, length - 2), length + 2)
        )
        window.check()
    assert window.stats().high_water == 4


def test_a_prompt_longer_than_the_window_maps_its_end_only() -> None:
    window = make(target_pages=400)
    pages = row(1, 300)
    window.attach(0, 0, pages)
    window.slide(0, 1000)
    for start in range(0, 1000, 100):
        window.ensure(0, start, start + 100, pages)
    assert window.stats().high_water == 2
    assert window.state(0).low == 992
    window.check()


def test_the_table_is_a_read_only_view() -> None:
    window = make()
    table = window.table
    with pytest.raises(ValueError, match="read-only"):
        table[1] = 5
    window.attach(0, 0, row(1, 1))
    window.ensure(0, 0, 1, row(1, 1))
    assert table[1] == 1


DAMAGE = {
    "alias": "I1", "lost": "I2", "listed": "I2", "unmapped": "I3", "short": "I3", "sink": "I4",
    "readers": "I5", "live": "I5", "early": "I6", "late": "I6", "begin": "I7", "until": "I7",
}  # fmt: skip


def damageable() -> DraftWindowSlotMap:
    window = make()
    mine, other = row(1, 3), row(11, 3)
    window.attach(0, 0, mine)
    window.ensure(0, 0, 12, mine)
    window.begin_step(1)
    window.attach(1, 0, other)
    window.ensure(1, 0, 12, other)
    window.release(1)
    window.check()
    return window


@pytest.mark.parametrize("kind", DAMAGE)
def test_check_sees_damage(kind: str) -> None:
    window = damageable()
    window.corrupt_for_test(kind)
    with pytest.raises(AssertionError, match=DAMAGE[kind]):
        window.check()


def test_bad_arguments() -> None:
    for shape in ((0, 2, 1, 1, 1), (1, 2, 0, 1, 1), (1, 2, 1, 0, 1), (1, 2, 1, 1, 0)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            DraftWindowSlotMap(*shape)
    with pytest.raises(ValueError, match="pool_pages is 1"):
        DraftWindowSlotMap(1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="more slots than an int32"):
        DraftWindowSlotMap(1 << 20, 2, 1 << 12, 1, 1)
    window = make()
    pages = row(1, 3)
    for slot in (-1, 4):
        with pytest.raises(ValueError, match=f"slot {slot} is outside 0..3"):
            window.attach(slot, 0, pages)
    with pytest.raises(ValueError, match="slot 2 is not attached"):
        window.ensure(2, 0, 1, pages)
    with pytest.raises(ValueError, match="slot 2 is not attached"):
        window.lows(int32(2))
    with pytest.raises(ValueError, match="position is -1"):
        window.attach(0, -1, pages)
    with pytest.raises(ValueError, match="position is 13 but pages hold 12"):
        window.rows_from(13, pages)
    window.attach(0, 4, pages)
    with pytest.raises(ValueError, match="slot 0 is attached"):
        window.attach(0, 4, pages)
    with pytest.raises(ValueError, match="start is 5 and end 4"):
        window.ensure(0, 5, 4, pages)
    with pytest.raises(ValueError, match="end is 13 but pages hold 12"):
        window.ensure(0, 4, 13, pages)
    with pytest.raises(ValueError, match="start is 3, but slot 0 begins at 4"):
        window.ensure(0, 3, 5, pages)
    for page in (0, 41):
        with pytest.raises(ValueError, match=rf"pages\[2\] is {page}, outside 1..40"):
            window.ensure(0, 4, 9, int32(1, 2, page))
        with pytest.raises(ValueError, match=rf"pages\[1\] is {page}, outside 1..40"):
            window.on_target_free(int32(1, page))
    window.ensure(0, 4, 5, pages)
    with pytest.raises(ValueError, match=r"pages\[1\] is 9, but slot 0 has page 2"):
        window.ensure(0, 4, 5, int32(1, 9, 3))
    with pytest.raises(ValueError, match="length is -1"):
        window.slide(0, -1)
    window.begin_step(5)
    window.end_step(5)
    with pytest.raises(ValueError, match="step is 5: step 5 was begun"):
        window.begin_step(5)
    for step in (5, 6):
        with pytest.raises(ValueError, match=f"step is {step}"):
            window.end_step(step)
    with pytest.raises(ValueError, match="needs a window"):
        window.corrupt_for_test("live")
    with pytest.raises(ValueError, match="unknown kind of damage 'nothing'"):
        damageable().corrupt_for_test("nothing")
    window.check()


def test_changes_are_told_once() -> None:
    window = make()
    pages = int32(7, 3, 9)
    window.attach(0, 0, pages)
    window.ensure(0, 0, 10, pages)
    changed, drafts = window.take_changes()
    assert sorted(changed.tolist()) == [3, 7, 9]
    assert window.table[changed].tolist() == drafts.tolist()
    assert not any(map(len, window.take_changes()))
    window.ensure(0, 10, 12, pages)
    assert not any(map(len, window.take_changes()))
    window.release(0)
    window.attach(1, 0, pages)
    window.ensure(1, 0, 1, pages)
    changed, drafts = window.take_changes()
    assert dict(zip(changed.tolist(), (drafts > 0).tolist(), strict=True)) == {
        3: False, 7: True, 9: False,
    }  # fmt: skip
    window.reset()
    changed, drafts = window.take_changes()
    assert (changed.tolist(), drafts.tolist()) == ([7], [0])


def test_verify_rows_are_ensured_together() -> None:
    """As slide and ensure, row by row, from where the row begins at least to where it may end."""
    one, two, width = make(pool_pages=40, window=6), make(pool_pages=40, window=6), 3
    table, allocator = RequestTable(4, 4), PageAllocator(40)
    for slot, length in ((0, 9), (1, 2), (2, 14)):
        pages = allocator.alloc(4)
        assert pages is not None
        table.open(slot, length, 60, pages, 0, True, True)
        for window in (one, two):
            window.attach(slot, 0, pages)
            window.slide(slot, length)
            window.ensure(slot, 0, length, pages)
        table.plan_chunk(slot, length, 1, 1)
    lengths = {0: 9, 1: 2, 2: 14}
    slots, caps = int32(0, 2, 1), int32(width, 1, width)
    ahead = 0  # tokens that the row in flight may emit, less the one that it surely does
    for step in range(2, 7):
        for window in (one, two):
            window.begin_step(step)
        rows = table.plan_decode(step, slots, caps, allocator)
        assert np.frombuffer(rows.q_caps, np.int32).tolist() == caps.tolist()
        assert one.ensure_verify(table, slots, caps) == (4, 0)
        for slot, cap in zip(slots.tolist(), caps.tolist(), strict=True):
            two.slide(slot, lengths[slot])
            end = lengths[slot] + (ahead and cap - 1) + cap
            two.ensure(slot, lengths[slot], end, table.pages(slot))
        assert [s[:3] for s in map(one.state, range(3))] == [
            s[:3] for s in map(two.state, range(3))
        ]
        assert (one.table > 0).tolist() == (two.table > 0).tolist()
        one.check()
        for slot in lengths:  # the row before this one is in
            table.settle(slot, 1, step - 1)
            lengths[slot] += 1
        ahead = 1
    with pytest.raises(ValueError, match="2 caps for 3 slots"):
        one.ensure_verify(table, slots, int32(1, 1))
    with pytest.raises(ValueError, match="slot 3 is not open"):
        one.ensure_verify(table, int32(3), int32(1))
