"""Draft windows through the core: every row that is read was written, every page comes back."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from outrider.engine_core import admission
from outrider.engine_core.checks import InvariantBroken, check_all
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_window import WindowPool, draft_pool_pages

from .core_fixtures import assert_all_pages_back, expected, make_core, request, run_all, take
from .window_worker import WindowWorker

WIDTH = 4


def flags(window: int, **more: Any) -> dict[str, Any]:
    return {
        "speculative_algorithm": "DFLASH",
        "speculative_num_steps": WIDTH - 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": WIDTH,
        "speculative_draft_window_size": window,
        **more,
    }


def window_core(
    window: int, page_size: int, num_pages: int = 64, running: int = 4, **more: Any
) -> tuple[EngineCore, WindowWorker]:
    overlap = not more.get("disable_overlap_schedule", False)
    context = more.pop("context_length", 256)
    pages = draft_pool_pages(running, window, page_size, WIDTH, overlap)
    worker = WindowWorker(
        pages, window, WIDTH, num_pages=num_pages, page_size=page_size,
        max_slots=2 * running, context_length=context,
    )  # fmt: skip
    given = flags(window, max_running_requests=running, **more)
    core = make_core(worker, **given)
    assert core.config.window_pool == WindowPool(window, pages)
    return core, worker


def assert_no_draft_page(core: EngineCore, flush: bool = True) -> None:
    windows = core.scheduler.windows
    assert windows is not None
    stats = windows.stats
    assert (stats.live_pages, stats.deferred_pages) == (0, 0)
    assert not windows.map.table.any()
    if flush:
        assert_all_pages_back(core)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("page_size", "window"), [(1, 4), (1, 13), (4, 6), (16, 9), (16, 40)])
def test_what_is_read_was_written(
    page_size: int, window: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with prefixes of each other, more than fit, some aborted; the worker asserts."""
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    reached: Counter[str] = Counter()
    for seed in range(4):
        rng = random.Random(seed)
        core, worker = window_core(
            window, page_size, 128 // page_size, chunked_prefill_size=rng.choice((7, 30, 512)),
            disable_overlap_schedule=not overlap,
        )  # fmt: skip
        stems = [[rng.randrange(1, 50) for _ in range(40)] for _ in range(2)]
        messages = []
        for i in range(14):
            prompt = rng.choice(stems)[: rng.randrange(1, 40)] + [i] * rng.randrange(3)
            messages.append(request(f"r{i}", prompt, rng.randrange(1, 50), ignore_eos=i % 2 > 0))
        got: dict[str, Any] = {}
        aborted = set()
        for message in messages:
            assert core.submit(message) is None
            for _ in range(rng.randrange(6)):
                take(got, core.step())
            rid = f"r{rng.randrange(14)}"
            if rng.random() < 0.2 and core.abort(rid):
                aborted.add(rid)
        run_all(core, got)
        for message in messages:
            if message.rid not in aborted:
                wanted, _ = expected(message, 256, 50)
                assert got[message.rid].tokens == wanted
        assert_no_draft_page(core)
        assert core.scheduler.windows is not None
        stats = core.scheduler.windows.stats
        reached.update(worker.seen)
        reached += Counter(
            moved=worker.moved,
            aborted=len(aborted),
            retracted=core.scheduler.counters.retractions,
            found=stats.rows_found,
            missing=stats.rows_missing,
            evicted=core.scheduler.cache.evicted_pages,
            short_drafts=core.stats(0).window_short_drafts,
            failures=stats.alloc_failures,
        )
    for name in ("whole", "moved", "aborted", "missing", "retracted", "evicted"):
        assert reached[name], name
    assert page_size > 1 or reached["found"]
    assert reached["whole"] > reached["short"] + reached["none"]
    assert page_size == 16 or reached["short_drafts"]


def test_a_pool_that_is_short_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine_core.draft_window.draft_pool_pages", lambda *_: 5)
    worker = WindowWorker(5, 8, WIDTH, num_pages=64, page_size=4, max_slots=8)
    core = make_core(worker, **flags(8, max_running_requests=4))
    messages = [request(f"r{i}", range(1, 10 + i), 30, ignore_eos=True) for i in range(6)]
    for message in messages:
        assert core.submit(message) is None
    got = run_all(core)
    for message in messages:
        assert got[message.rid].tokens == expected(message, 256, 50)[0]
    assert core.stats(0).window_page_failures > 0
    assert worker.seen["none"] > 0
    assert_no_draft_page(core)


def test_a_preempted_row_in_the_step_does_not_draft() -> None:
    """Its pages are gone from the very plan that has its last row."""
    core, worker = window_core(
        5, 4, 12, running=2, enable_priority_scheduling=True, priority_preemption_threshold=0
    )
    low = [request(f"low{i}", range(1, 14), 20, ignore_eos=True) for i in range(2)]
    for message in low:
        assert core.submit(message) is None
    got: dict[str, Any] = {}
    for _ in range(3):
        take(got, core.step())
    high = request("high", range(20, 40), 5, ignore_eos=True, priority=1)
    assert core.submit(high) is None
    run_all(core, got)
    for message in (*low, high):
        assert got[message.rid].tokens == expected(message, 256, 50)[0]
    assert core.scheduler.counters.preemptions > 0
    assert worker.seen["none"] > 0
    assert_no_draft_page(core)


def test_a_long_context_costs_the_draft_its_window_alone() -> None:
    length, window, page = 100_000, 64, 16
    core, worker = window_core(
        window, page, length // page + 8, running=1, context_length=length + 100,
        chunked_prefill_size=16_384, max_total_tokens=None,
    )  # fmt: skip
    prompt = np.random.default_rng(0).integers(1, 50, length).tolist()
    message = request("long", prompt, 20, ignore_eos=True)
    assert core.submit(message) is None
    got = run_all(core)
    assert len(got["long"].tokens) == 20
    stats = core.stats(0)
    # Of 6,252 pages: a window, the page that it begins in, and three steps' tokens.
    assert stats.window_peak_pages <= -(-(window + page - 1 + 3 * WIDTH) // page) == 6
    assert len(worker.pool) == 7 * page
    assert worker.seen["whole"] > 5
    assert stats.window_short_drafts == stats.window_page_failures == 0
    assert worker.moved < 12
    assert_no_draft_page(core)


def test_a_failed_worker_leaves_no_draft_page() -> None:
    core, _ = window_core(6, 4)
    for i in range(3):
        assert core.submit(request(f"r{i}", range(1, 12), 30, ignore_eos=True)) is None
    for _ in range(5):
        core.step()
    assert len(core.fail_all("it failed")) == 3
    check_all(core.scheduler)
    assert_no_draft_page(core, flush=False)


@pytest.mark.parametrize("kind", ["open", "alias"])
def test_damage_is_noticed(kind: str) -> None:
    core, _ = window_core(24, 4)
    for i in range(2):
        assert core.submit(request(f"r{i}", range(1, 30), 60, ignore_eos=True)) is None
    for _ in range(6):
        core.step()
    windows = core.scheduler.windows
    assert windows is not None
    slot = core.scheduler.batch.decoding[0].slot
    if kind == "open":
        windows.leave(slot)
    else:
        other = core.scheduler.batch.decoding[1].slot
        windows.map.release(other)
        windows.map.attach(other, 0, core.scheduler.batch.table.pages(slot))
        windows.map.ensure(other, 0, 30, core.scheduler.batch.table.pages(slot))
    with pytest.raises(InvariantBroken, match="draft_windows"):
        check_all(core.scheduler)
