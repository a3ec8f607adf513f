"""Which waiting request may start: slots, pages for its tokens, and an estimate of new ones."""

from typing import final

import numpy as np

from .prefix_cache import CachedPrefix, PrefixCache
from .queue import WaitingQueue
from .request import Request, Running, Waiting
from .running_batch import RunningBatch

CLIP_NEW_TOKENS = 4096  # new tokens of one request that are looked at, at most
INITIAL_RATIO = 0.7
FLOOR_RATIO = 0.14 * INITIAL_RATIO
DECAY_STEPS = 600
RETRACT_LOOKAHEAD = 20  # tokens a request that a retraction must leave room for


@final
class NewTokenRatio:
    """Expected share of the allowed new tokens that running requests will really need.

    It falls with every decode step that went well and jumps up when pages ran out.
    """

    def __init__(self) -> None:
        self.value = INITIAL_RATIO

    def decay(self) -> None:
        """A decode step found its pages."""
        step = (INITIAL_RATIO - FLOOR_RATIO) / DECAY_STEPS
        self.value = max(FLOOR_RATIO, self.value - step)

    def retracted(self, generated: int, allowed: int, running: int) -> None:
        """Pages ran out; ``generated`` of ``allowed`` tokens came from the ``running`` left."""
        self.value = min(1.0, (generated + RETRACT_LOOKAHEAD * running) / (allowed + 1))

    def reset(self) -> None:
        """Nothing runs: start again."""
        self.value = INITIAL_RATIO


@final
class Admission:
    """Moves the next waiting request into a slot, or says that it has to wait."""

    def __init__(
        self,
        cache: PrefixCache,
        queue: WaitingQueue,
        batch: RunningBatch,
        max_running: int,
        kv_reach: int,
        recomputes_last: bool,
    ) -> None:
        """``kv_reach``: tokens that drafting writes from a row's first on (see ``CoreConfig``).

        ``recomputes_last``: the last position of a cached prefix is computed again, in a page of
        the request's own, since the drafter's KV there depends on the token that follows.
        """
        self._cache = cache
        self._queue = queue
        self._batch = batch
        self._max_running = max_running
        self._kv_reach = kv_reach
        self._recomputes_last = recomputes_last
        self.ratio = NewTokenRatio()

    def next_waiting(self) -> Waiting:
        """Whom the queue's policy puts first; the queue must not be empty."""
        return self._queue.next(self._cached_length)

    def slot_free(self) -> bool:
        """Whether one more request may run."""
        return len(self._batch) < self._max_running and bool(self._batch.free_slots)

    def admit(self, waiting: Waiting) -> tuple[Running, CachedPrefix] | None:
        """Start ``waiting``; return it and its cached prefix, or None where it does not fit.

        One token at least is computed. With nothing running only its present tokens have to fit:
        it was checked to fit alone. A page that is to be copied takes room of the pool until that
        is done: where there is none, the whole page is computed again.
        """
        if not self.slot_free():
            return None
        request = waiting.request
        cache, tokens = self._cache, request.tokens()
        enter = cache.enter_recomputing if self._recomputes_last else cache.enter
        # Locked before counting: its pages are not evictable any more.
        prefix = enter(tokens, request.salt, request.cacheable)
        demand = self.demand(request, self._batch.running, len(prefix.pages))
        if demand > cache.available:
            prefix = cache.without_copy(prefix)
        if demand > cache.available:
            cache.unlock(prefix.node)
            return None
        pages = cache.alloc(cache.pages_for(len(tokens)) - len(prefix.pages))
        assert pages is not None, "admission counted pages that are not there"
        self._queue.admitted(waiting)
        return self._batch.enter(waiting, prefix, pages), prefix

    def demand(self, request: Request, running: list[Running], cached_pages: int) -> int:
        """Pages that must be available for ``request`` to start beside ``running``."""
        need = self._cache.pages_for(request.length) - cached_pages
        if not running:
            return need
        new = min(request.max_total - request.length, CLIP_NEW_TOKENS)
        reach = self._kv_reach if request.speculative else 0
        growth = self._cache.pages_for(request.length + new + reach) - need - cached_pages
        slots = np.array([r.slot for r in running], dtype=np.int32)
        table = self._batch.table
        return need + growth + table.expected_pages(slots, self.ratio.value, CLIP_NEW_TOKENS)

    def _cached_length(self, waiting: Waiting) -> int:
        request = waiting.request
        return self._cache.match(request.tokens(), request.salt, request.cacheable).length
