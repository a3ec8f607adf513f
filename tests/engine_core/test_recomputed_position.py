"""Drafters whose KV depends on the next token: the last matched position is computed again.

The fake worker's draft KV remembers the next token that each position was computed with, and what
it reads must be right but for page ends inside the cached prefix, which are counted.
"""

from typing import Any

import pytest

from outrider.engine_core import admission
from outrider.engine_core.checks import InvariantBroken, check_all
from outrider.engine_core.core import EngineCore
from outrider.engine_core.ids import RowKind, i32
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.plan import SlotInit, StepPlan
from outrider.engine_core.request import Running
from outrider.engine_core.scheduler import Scheduler

from .core_fixtures import (
    Got,
    assert_all_pages_back,
    device_oracle,
    expected,
    make_core,
    request,
    run_all,
    take,
)
from .fake_worker import FakeWorker

DEVICE: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_source": "gpu",
}


def shifting(
    page_size: int, tokens: int = 512, **flags: object
) -> tuple[FakeWorker, EngineCore, list[StepPlan]]:
    """A core with such a drafter, and the plans that it launches."""
    worker = FakeWorker(
        num_pages=tokens // page_size,
        page_size=page_size,
        device_drafter=device_oracle(),
        draft_reach=9,
        shifts_tokens=True,
    )
    plans: list[StepPlan] = []
    launch = worker.launch

    def watched(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    worker.launch = watched  # type: ignore[method-assign]
    return worker, make_core(worker, **DEVICE, **flags), plans


def serve(core: EngineCore, *messages: GenerateRequest) -> dict[str, Got]:
    """Run requests one after the other; each gets its own continuation."""
    got: dict[str, Got] = {}
    for message in messages:
        assert core.submit(message) is None
        run_all(core, got)
        assert got[message.rid].tokens == expected(message, 256, 50)[0]
    return got


def inits(plans: list[StepPlan]) -> list[SlotInit]:
    return [init for plan in plans for init in plan.inits]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [33, 47, 48, 49, 64])
def test_no_hit_is_lost_but_one_position(page_size: int, overlap: bool, length: int) -> None:
    worker, core, plans = shifting(page_size, disable_overlap_schedule=not overlap)
    prompt = [1 + i % 48 for i in range(length)]
    # The second has the whole prompt cached, the others part of it and go on differently.
    got = serve(
        core,
        request("first", prompt, 8),
        request("same", prompt, 8),
        request("longer", [*prompt, 7, 7, 7], 8),
        request("branch", [*prompt[:32], 9, 9, 9, 9], 8),
    )
    for rid, cached, own in (("same", length, 0), ("longer", length, 3), ("branch", 32, 4)):
        stats = got[rid].last.stats  # type: ignore[union-attr]
        assert stats is not None
        assert stats.cached_tokens == cached // page_size * page_size - 1
        assert stats.cached_tokens >= cached + own - page_size - 4
    copies = [init.page_copies for init in inits(plans)]
    assert [len(pairs) for pairs in copies] == [0, *[page_size > 1] * 3]
    assert worker.page_copies == sum(map(len, copies))
    for init in inits(plans)[1:]:
        first = next(
            int(i32(plan.starts)[row])
            for plan in plans
            if init in plan.inits
            for row, slot in enumerate(i32(plan.slots).tolist())
            if slot == init.slot and plan.kinds[row] != RowKind.VERIFY
        )
        assert first == init.cached_len
    assert_all_pages_back(core)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_page_end_inside_the_prefix_may_be_stale_and_output_is_exact(page_size: int) -> None:
    """Two continuations of one page: whoever follows the second reads the end of the page as it
    was computed beside the first, and gets its own text all the same."""
    worker, core, _ = shifting(page_size)
    page = list(range(1, 9))
    first, second = [*page, 20, 21, 22, 23, 24], [*page, 30, 31, 32, 33, 34]
    serve(core, request("first", first, 4), request("second", second, 4))
    assert worker.draft_kv is not None
    assert worker.draft_kv.stale == 0  # the second computed its last matched position again
    serve(core, request("third", [*second[:12], 40, 41], 20, ignore_eos=True))
    assert worker.draft_kv.stale > 0
    assert_all_pages_back(core)


def test_where_the_pool_has_no_room_for_the_copy_the_page_is_computed_again() -> None:
    _, core, plans = shifting(4, 48)
    prompt = list(range(1, 33))
    serve(core, request("first", prompt, 2, ignore_eos=True))
    serve(core, request("second", prompt, 16, ignore_eos=True))
    assert [init.cached_len for init in inits(plans)] == [0, 31]
    # Eight pages to share but the last, and twelve in all: no room for its source.
    serve(core, request("third", [*prompt, *range(34, 47)], 4, ignore_eos=True))
    assert inits(plans)[-1].cached_len == 28
    assert not inits(plans)[-1].page_copies
    assert_all_pages_back(core)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_request_after_the_other_may_fill_the_pool(page_size: int) -> None:
    """Copies and duplicates of cached pages never keep a request from ending that fits alone."""
    _, core, _ = shifting(page_size, 64)
    prompt = list(range(1, 33))
    for turn in range(4):
        message = request(f"r{turn}", prompt[: 32 - turn], 33 + turn, ignore_eos=True)
        serve(core, message)
    assert_all_pages_back(core)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_many_with_one_prefix_under_pressure(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CLIP_NEW_TOKENS", 1)
    worker, core, plans = shifting(page_size, 160, chunked_prefill_size=16)
    messages = [
        request(f"r{i}", [*range(1, 33), *range(i, i + i % 3)], 40, stream=False, ignore_eos=True)
        for i in range(12)
    ]
    for message in messages:
        assert core.submit(message) is None
    got: dict[str, Got] = {}
    for turn in range(30):
        take(got, core.step())
        if turn % 10 == 5:
            core.abort(f"r{turn // 10 * 4}")
    run_all(core, got)
    for message in messages:
        client = got[message.rid]
        tokens = expected(message, 256, 50)[0]
        assert client.finish is not None
        if client.finish.kind == "abort":
            assert client.tokens == tokens[: len(client.tokens)]
        else:
            assert client.tokens == tokens
    assert core.scheduler.counters.retractions > 0
    assert (worker.page_copies > 3) == (page_size > 1)
    assert len(inits(plans)) > 12
    assert_all_pages_back(core)


def copying() -> Scheduler:
    """A step in flight that copies a page, of the newest request's."""
    _, core, plans = shifting(4)
    prompt = list(range(1, 33))
    serve(core, request("first", prompt, 4))
    assert core.submit(request("second", [*prompt, 7], 8)) is None
    core.step()
    assert plans[-1].inits[0].page_copies
    assert core.scheduler.flights
    check_all(core.scheduler)
    return core.scheduler


def newest(scheduler: Scheduler) -> Running:
    return (scheduler.batch.prefilling + scheduler.batch.decoding)[-1]


def test_a_checker_notices_copies_that_nobody_keeps() -> None:
    scheduler = copying()
    newest(scheduler).lease.end_copy()  # too early: the page may be evicted before it is read
    with pytest.raises(InvariantBroken, match=r"copies_in_flight: slot . copies"):
        check_all(scheduler)
    scheduler = copying()
    lease = newest(scheduler).lease
    scheduler.cache.unlock(lease._source_node)
    with pytest.raises(InvariantBroken, match=r"copies_in_flight: .*may be evicted"):
        check_all(scheduler)
    scheduler = copying()
    scheduler.batch.table.corrupt_for_test(newest(scheduler).slot, "swap")
    with pytest.raises(InvariantBroken, match=r"copies_in_flight: slot . copies to page"):
        check_all(scheduler)
