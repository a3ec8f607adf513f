"""Drafters with KV write ahead of the rows they draft for: pages are there and given back."""

from typing import Any

import numpy as np
import pytest

from outrider.cython_ext.page_allocator import PageAllocator
from outrider.cython_ext.request_table import RequestTable
from outrider.engine_core import admission
from outrider.engine_core.checks import InvariantBroken, check_all
from outrider.engine_core.draft_config import SpecShape
from outrider.engine_core.drafter_spec import MAX_DRAFT_TOKENS
from outrider.engine_core.ids import I32, i32
from outrider.engine_core.memory_parts import OVERRUN_TOKENS
from outrider.engine_core.spec_shape import MAX_LEVEL_TOKENS, draft_reach

from .core_fixtures import (
    assert_all_pages_back,
    device_oracle,
    expected,
    make_core,
    request,
    run_all,
)
from .fake_worker import FakeWorker

DEVICE: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_source": "gpu",
}


def int32(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize(("page_size", "pages"), [(1, 160), (4, 40), (16, 10)])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("reach", [4, 20])
def test_pages_reach_as_far_as_drafts_are_written(
    page_size: int, pages: int, overlap: bool, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake worker asserts every page; more requests than fit, some aborted on the way."""
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    worker = FakeWorker(
        num_pages=pages,
        page_size=page_size,
        context_length=80,
        device_drafter=device_oracle(),
        draft_reach=reach,
    )
    core = make_core(worker, disable_overlap_schedule=not overlap, **DEVICE)
    messages = [request(f"r{i}", range(1 + i, 20 + i), 70, ignore_eos=True) for i in range(6)]
    for message in messages:
        assert core.submit(message) is None
    for turn in range(12):
        core.step()
        if turn in (4, 7):
            assert core.abort(f"r{turn - 4}")
    got = run_all(core)
    for i, message in enumerate(messages):
        if i not in (0, 3):
            assert got[message.rid].last.stats.completion_tokens == 61  # type: ignore[union-attr]
    assert worker.draft_kv is not None
    assert worker.draft_kv.ahead > 0
    counters = core.scheduler.counters
    assert counters.spec_accepted_tokens > 0
    # With 16 tokens a page and a reach of 20 so few are admitted that none is retracted.
    assert counters.retractions > 0 or (page_size, reach) == (16, 20)
    assert_all_pages_back(core)


def test_drafts_give_way_where_the_pool_has_no_room_for_their_reach() -> None:
    """A request that fills the pool is decoded to its end, without drafts for want of pages."""
    worker = FakeWorker(num_pages=10, page_size=4, device_drafter=device_oracle(), draft_reach=30)
    core = make_core(worker, **DEVICE)
    message = request("a", range(1, 9), 33, ignore_eos=True)
    assert core.submit(message) is None
    got = run_all(core)
    assert got["a"].tokens == expected(message, 256, 50)[0]
    assert core.scheduler.counters.shrunk_steps > 0
    assert core.scheduler.counters.retractions == 0
    assert got["a"].last.stats.spec_off_reason == "no KV pages for drafts"  # type: ignore
    assert_all_pages_back(core)


def test_reach_counts_only_behind_rows_that_draft() -> None:
    table, allocator = RequestTable(2, 4, 10), PageAllocator(16)
    allocator.alloc(2)
    table.open(0, 7, 40, int32(1, 2), 0, True, True)
    table.plan_chunk(0, 7, 1, 1)
    assert table.lacking_pages(int32(0), int32(1)) == 0  # position 7
    assert table.lacking_pages(int32(0), int32(3)) == 3  # positions 7..16
    assert table.lacking_pages(int32(0), int32(12)) == 3  # positions 7..18
    table.plan_decode(2, int32(0), int32(3), allocator)
    assert table.held(0) == 5
    assert table.state(0).reach == 10
    table.settle(0, 1, 1)
    # Row 2 in flight may end at 10: the next one's reach is behind that.
    rows = table.plan_decode(3, int32(0), int32(2), allocator)
    assert i32(rows.page_indexes).tolist() == []
    assert table.lacking_pages(int32(0), int32(12)) == 1
    table.settle(0, 3, 2)
    table.settle(0, 2, 3)
    assert table.state(0).reach == 0
    assert table.expected_pages(int32(0), 1.0, 4) == 2  # 13 + 4 + 10 tokens
    table.detach(0)
    assert table.expected_pages(int32(0), 1.0, 4) == 0


def test_admission_counts_the_reach() -> None:
    """Beside a running request only one that leaves room for both reaches is admitted."""
    for reach, together in ((8, True), (40, False)):
        worker = FakeWorker(
            num_pages=20, page_size=4, device_drafter=device_oracle(), draft_reach=reach
        )
        core = make_core(worker, **DEVICE)
        for i in range(2):
            assert core.submit(request(f"r{i}", range(1, 9), 16, ignore_eos=True)) is None
        core.step()
        core.step()
        assert (len(core.scheduler.batch) == 2) == together
        run_all(core)
        assert_all_pages_back(core)


def test_a_checker_notices_pages_that_do_not_reach() -> None:
    worker = FakeWorker(device_drafter=device_oracle(), draft_reach=12)
    core = make_core(worker, **DEVICE)
    assert core.submit(request("a", range(1, 9), 40, ignore_eos=True)) is None
    for _ in range(4):
        core.step()
    check_all(core.scheduler)
    core.scheduler.batch.table.corrupt_for_test(0, "reach")
    with pytest.raises(InvariantBroken, match="pages_cover"):
        check_all(core.scheduler)


def test_reach_stays_within_the_page_tables() -> None:
    """Workers give each slot columns for its context and OVERRUN_TOKENS more."""
    assert OVERRUN_TOKENS >= 2 * MAX_DRAFT_TOKENS
    widest = draft_reach(SpecShape(1 + MAX_LEVEL_TOKENS // 4, 4, 8))
    RequestTable(1, 4, widest)
    with pytest.raises(ValueError, match="draft_reach is 66: give 0 to 65 tokens"):
        RequestTable(1, 4, widest + 1)
