"""States that cannot be built, and leases that are released once and in time."""

import numpy as np
import pytest

from outrider.engine_core.commit import LENGTH, Progress
from outrider.engine_core.ids import SlotId
from outrider.engine_core.lease import Lease
from outrider.engine_core.prefix_cache import CachedPrefix, PrefixCache
from outrider.engine_core.request import Draining, Finished, Request, Running, Waiting

from .core_fixtures import request


def make_request() -> Request:
    message = request("r", [1, 2, 3])
    progress = Progress(message.params, 3, 100, frozenset({0}), None)
    return Request(message, 0, 0, 11, progress)


def open_lease(cache: PrefixCache) -> Lease:
    return Lease(cache, "", CachedPrefix(0, np.empty(0, np.int32), 0))


def test_a_request_passes_through_its_states() -> None:
    cache = PrefixCache(8, 4, True)
    waiting = Waiting(make_request())
    running = waiting.admit(SlotId(2), 1, open_lease(cache))
    assert isinstance(running, Running)
    draining = running.leave(5)
    assert draining.retracted
    pages = cache.alloc(1)
    assert pages is not None
    draining.lease.release(pages, 5, 5)
    assert draining.settle() == waiting
    draining.request.progress.end(LENGTH)
    assert not draining.retracted
    assert isinstance(draining.settle(), Finished)


def test_impossible_states_cannot_be_built() -> None:
    cache = PrefixCache(8, 4, True)
    done = make_request()
    done.progress.end(LENGTH)
    with pytest.raises(ValueError, match="cannot wait"):
        Waiting(done)
    with pytest.raises(ValueError, match="has a reason"):
        Finished(make_request())
    released = open_lease(cache)
    released.release(np.empty(0, np.int32), 0, 0)
    with pytest.raises(ValueError, match="needs its lease"):
        Running(make_request(), SlotId(0), 1, released)
    with pytest.raises(ValueError, match="needs its lease"):
        Draining(make_request(), SlotId(0), released, 1)
    with pytest.raises(ValueError, match="after its lease"):
        Draining(make_request(), SlotId(0), open_lease(cache), 1).settle()


def test_a_lease_is_released_once_and_not_before_its_last_step() -> None:
    cache = PrefixCache(8, 4, True)
    lease = open_lease(cache)
    pages = cache.alloc(3)
    assert pages is not None
    with pytest.raises(RuntimeError, match="while step 7 is in flight"):
        lease.release(pages, 7, 6)
    assert not lease.released
    lease.release(pages, 7, 7)
    assert lease.released
    assert cache.available == 8
    with pytest.raises(RuntimeError, match="after its release"):
        lease.release(pages, 7, 7)
    with pytest.raises(RuntimeError, match="after its release"):
        lease.publish(np.arange(4, dtype=np.int32), pages)


def test_a_second_copy_of_a_prefix_stays_private_until_released() -> None:
    cache = PrefixCache(8, 4, True)
    tokens = np.arange(10, dtype=np.int32)
    leases: list[tuple[Lease, np.ndarray[tuple[int], np.dtype[np.int32]]]] = []
    for _ in range(2):
        pages = cache.alloc(3)
        assert pages is not None
        lease = open_lease(cache)
        lease.publish(tokens, pages)
        leases.append((lease, pages))
    (first, pages), (second, copies) = leases
    assert first.private(pages).tolist() == pages[2:].tolist()
    assert second.private(copies).tolist() == copies.tolist()
    assert cache.tree.locked_pages == 2
    first.release(pages, 1, 1)
    assert cache.tree.locked_pages == 0  # the copies do without the tree's pages
    assert cache.available == 5
    second.release(copies, 1, 1)
    assert cache.available == 8


def test_a_lease_keeps_the_page_that_it_copies_until_the_step_is_in() -> None:
    cache = PrefixCache(8, 4, True)
    tokens = np.arange(10, dtype=np.int32)
    pages = cache.alloc(2)
    assert pages is not None
    cache.insert(tokens, pages, "")
    for copied in (True, False):
        prefix = cache.enter_recomputing(tokens, "", len(tokens) - 1)
        assert (prefix.length, prefix.pages.tolist()) == (7, pages[:1].tolist())
        assert prefix.source == pages[1]
        lease = Lease(cache, "", prefix)
        assert cache.tree.locked_pages == 2
        if copied:
            lease.end_copy()
            lease.end_copy()
            assert lease.source == 0
            assert cache.tree.locked_pages == 1
        lease.release(pages[:1], 1, 1)
        assert cache.tree.locked_pages == 0
    prefix = cache.without_copy(cache.enter_recomputing(tokens, "", len(tokens) - 1))
    assert (prefix.length, prefix.source, cache.tree.locked_pages) == (4, 0, 1)
    cache.unlock(prefix.node)
    assert cache.enter_recomputing(tokens[:3], "", 2).length == 0
    assert cache.enter_recomputing(tokens[:8], "", 7).length == 7  # all but the last token
    single = PrefixCache(8, 1, True)
    owned = single.alloc(3)
    assert owned is not None
    single.insert(tokens[:3], owned, "")
    prefix = single.enter_recomputing(tokens, "", len(tokens) - 1)
    assert (prefix.length, prefix.source, single.tree.locked_pages) == (2, 0, 2)


def test_a_disabled_cache_neither_matches_nor_keeps() -> None:
    cache = PrefixCache(8, 4, False)
    tokens = np.arange(10, dtype=np.int32)
    pages = cache.alloc(3)
    assert pages is not None
    lease = open_lease(cache)
    lease.publish(tokens, pages)
    assert cache.match(tokens, "", 9).length == 0
    lease.release(pages, 1, 1)
    assert cache.allocator.free_pages == 8


def test_allocation_evicts_what_nobody_uses() -> None:
    cache = PrefixCache(4, 1, True)
    pages = cache.alloc(3)
    assert pages is not None
    cache.insert(np.arange(3, dtype=np.int32), pages, "")
    assert cache.available == 4
    assert cache.alloc(5) is None
    taken = cache.alloc(3)
    assert taken is not None
    assert cache.evicted_pages == 2
    assert cache.tree.total_pages == 1
