"""Each invariant checker notices the damage that it is there for."""

from collections.abc import Callable

import numpy as np
import pytest

from outrider.engine_core import checks
from outrider.engine_core.checks import InvariantBroken, check_all
from outrider.engine_core.core import EngineCore
from outrider.engine_core.draft_window import WindowPool
from outrider.engine_core.ids import RequestId, SlotId
from outrider.engine_core.request import Running
from outrider.engine_core.scheduler import Scheduler
from outrider.engine_core.window_steps import WindowSteps

from .core_fixtures import make_core, request
from .fake_worker import FakeWorker


def busy_core() -> EngineCore:
    """Decoding, prefilling, draining and waiting requests, shared pages, a step in flight."""
    worker = FakeWorker(num_pages=64, page_size=4, max_slots=5)
    core = make_core(worker, chunked_prefill_size=16, max_running_requests=4)
    for i in range(4):
        assert core.submit(request(f"run{i}", range(1, 14 + i), 30, ignore_eos=True)) is None
        core.step()
        core.step()
    assert core.submit(request("long", [*range(1, 14), *range(20, 49)], 8)) is None
    for i in range(3):
        assert core.submit(request(f"wait{i}", range(1, 14), 8)) is None
    assert core.abort("run3")
    core.step()
    scheduler = core.scheduler
    assert scheduler.batch.prefilling
    assert scheduler.batch.decoding
    assert scheduler.batch.draining or scheduler.flights
    assert len(scheduler.queue) == 3
    return core


def first(scheduler: Scheduler) -> Running:
    return scheduler.batch.decoding[0]


def corrupt_column(kind: str) -> Callable[[Scheduler], None]:
    return lambda s: s.batch.table.corrupt_for_test(first(s).slot, kind)


def lose_page(s: Scheduler) -> None:
    s.cache.allocator.alloc(1)


def free_owned_page(s: Scheduler) -> None:
    holder = first(s)
    s.cache.free(holder.lease.private(s.batch.table.pages(holder.slot))[-1:].copy())


def unlock_shared(s: Scheduler) -> None:
    for owner in s.batch.by_slot:
        if owner is not None:
            s.cache.unlock(owner.lease.node)


def lock_more(s: Scheduler) -> None:
    pages = s.cache.alloc(1)
    assert pages is not None
    inserted = s.cache.insert(np.arange(40, 44, dtype=np.int32), pages, "")
    assert inserted is not None
    s.cache.lock(inserted.node)


def keep_for_no_copy(s: Scheduler) -> None:
    first(s).lease._source = 1


def release_early(s: Scheduler) -> None:
    running = first(s)
    running.lease.release(s.batch.table.pages(running.slot)[:0], 0, 0)


def free_slot_twice(s: Scheduler) -> None:
    s.batch.free_slots.append(s.batch.free_slots[0])


def own_free_slot(s: Scheduler) -> None:
    s.batch.free_slots.append(SlotId(first(s).slot))


def lose_slot(s: Scheduler) -> None:
    s.batch.free_slots.pop()


def list_twice(s: Scheduler) -> None:
    s.batch.prefilling.append(first(s))


def unlist(s: Scheduler) -> None:
    s.batch.prefilling.clear()


def forget_state(s: Scheduler) -> None:
    del s.batch.states[first(s).request.rid]


def misname_state(s: Scheduler) -> None:
    s.batch.states[RequestId("other")] = first(s)


def wait_unregistered(s: Scheduler) -> None:
    del s.batch.states[RequestId("wait1")]


def swap_queue(s: Scheduler) -> None:
    waiting = list(s.queue)
    waiting[0].request.arrival, waiting[1].request.arrival = 99, 98


def extra_token(s: Scheduler) -> None:
    first(s).request.progress.tokens.append(1)


def too_many_tokens(s: Scheduler) -> None:
    for waiting in s.queue:
        waiting.request.progress.tokens.extend([1] * 9)


def sent_too_much(s: Scheduler) -> None:
    first(s).request.progress.sent = 99


def lose_flight(s: Scheduler) -> None:
    s.flights.pop()


def skip_step(s: Scheduler) -> None:
    s.done_step -= 1


def lose_windows(s: Scheduler) -> None:
    s.windows = WindowSteps(WindowPool(8, 9), s.cache.total, s.cache.page_size, 5)


@pytest.mark.parametrize(
    ("checker", "damage"),
    [
        (checks.compiled_structures, lambda s: s.cache.allocator.corrupt_for_test("duplicate")),
        (checks.page_conservation, lose_page),
        (checks.page_conservation, free_owned_page),
        (checks.page_conservation, corrupt_column("held")),
        (checks.shared_pages_locked, corrupt_column("page")),
        (checks.shared_pages_locked, lock_more),
        (checks.shared_pages_locked, unlock_shared),
        (checks.copies_in_flight, keep_for_no_copy),
        (checks.leases_open, release_early),
        (checks.slots_partition, free_slot_twice),
        (checks.slots_partition, own_free_slot),
        (checks.slots_partition, lose_slot),
        (checks.phases_partition, list_twice),
        (checks.phases_partition, unlist),
        (checks.states_registered, forget_state),
        (checks.states_registered, misname_state),
        (checks.states_registered, wait_unregistered),
        (checks.queue_order, swap_queue),
        (checks.table_agrees, extra_token),
        (checks.table_agrees, corrupt_column("length")),
        (checks.table_agrees, corrupt_column("filled")),
        (checks.table_agrees, corrupt_column("max_total")),
        (checks.lengths_capped, too_many_tokens),
        (checks.lengths_capped, sent_too_much),
        (checks.pages_cover, corrupt_column("held")),
        (checks.flights_consistent, lose_flight),
        (checks.flights_consistent, skip_step),
        (checks.draft_windows, lose_windows),
    ],
)
def test_checker_notices(
    checker: Callable[[Scheduler], None], damage: Callable[[Scheduler], None]
) -> None:
    scheduler = busy_core().scheduler
    check_all(scheduler)
    damage(scheduler)
    with pytest.raises(AssertionError):
        checker(scheduler)
    with pytest.raises(InvariantBroken):
        check_all(scheduler)


def test_every_checker_has_a_test() -> None:
    mark = next(m for m in test_checker_notices.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == set(checks.CHECKS)
