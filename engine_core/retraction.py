"""What gives way when pages run out: drafts first, then whole requests."""

from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np

from .admission import Admission
from .counters import Counters
from .ids import I32
from .messages import FinishReason
from .prefix_cache import PrefixCache
from .request import Running
from .running_batch import RunningBatch

OUT_OF_MEMORY = (
    "out of KV memory: the pool's {total} pages cannot hold this request's {tokens} tokens; "
    "raise --max-total-tokens or --mem-fraction-static, or ask for fewer tokens"
)


class DecodeWish(NamedTuple):
    """Verify rows to plan: slots int32[n], and their query tokens at most, int32[n]."""

    slots: I32
    caps: I32


@final
class Retraction:
    """Makes the decode rows of a step fit into memory.

    A victim's pages are free only once its rows in flight are in, so rows may be held back for
    one step although enough was retracted.
    """

    def __init__(
        self,
        cache: PrefixCache,
        batch: RunningBatch,
        admission: Admission,
        counters: Counters,
        by_priority: bool,
    ) -> None:
        self._cache = cache
        self._batch = batch
        self._admission = admission
        self._counters = counters
        self._by_priority = by_priority

    def fit(
        self,
        slots: I32,
        caps: I32,
        settle: Callable[[], None],
        end: Callable[[Running, FinishReason], None],
    ) -> DecodeWish:
        """Return slots and caps, both int32[n], for whose rows the pool has pages, now or soon.

        ``caps``: query tokens of a row. ``settle`` frees what drains without a row in flight;
        ``end`` ends a request.
        """
        wish = DecodeWish(slots, caps)
        need = self._need(wish)
        if need > self._cache.available and int(caps.max()) > 1:
            wish = self._without_drafts()
            need = self._need(wish)
            self._counters.shrunk_steps += 1
        if need > self._cache.available:
            wish = self._retract_until_fit(wish, settle, end)
            need = self._need(wish)
        self._cache.reserve(need)
        return wish

    def _retract_until_fit(
        self,
        wish: DecodeWish,
        settle: Callable[[], None],
        end: Callable[[Running, FinishReason], None],
    ) -> DecodeWish:
        retracted = False
        while self._lacks(wish) and len(self._batch) > 1:
            self.retract(self.victim(self._batch.running))
            settle()
            retracted = True
            wish = self._without_drafts()
        if retracted:
            self._raise_ratio()
        if self._lacks(wish):
            last = self._batch.decoding[0]
            if last.lease.has_duplicates:  # it fits once it shares the tree's pages
                self.retract(last)
            else:
                self._give_up(last, end)
            settle()
            wish = self._without_drafts()
        return wish

    def victim(self, candidates: list[Running]) -> Running:
        """Lowest priority (when it counts), fewest generated, longest prompt, latest arrival."""
        return min(candidates, key=self._rank)

    def retract(self, running: Running) -> None:
        """Take its slot and pages away; it will wait again with what it has generated."""
        running.request.progress.retractions += 1
        self._counters.retractions += 1
        self._batch.leave(running)

    def _rank(self, running: Running) -> tuple[int, int, int, int]:
        request = running.request
        priority = request.priority if self._by_priority else 0
        return (priority, request.generated, -len(request.prompt), -request.arrival)

    def _need(self, wish: DecodeWish) -> int:
        return self._batch.table.lacking_pages(wish.slots, wish.caps)

    def _lacks(self, wish: DecodeWish) -> bool:
        return self._need(wish) > self._cache.available + self._batch.pages_to_come()

    def _without_drafts(self) -> DecodeWish:
        slots, _ = self._batch.table.decodable(self._batch.decoding_slots(), 0)
        return DecodeWish(slots, np.ones(len(slots), dtype=np.int32))

    def _raise_ratio(self) -> None:
        requests = [r.request for r in self._batch.running]
        generated = sum(r.generated for r in requests)
        allowed = sum(r.max_total - len(r.prompt) for r in requests)
        self._admission.ratio.retracted(generated, allowed, len(requests))

    def _give_up(self, running: Running, end: Callable[[Running, FinishReason], None]) -> None:
        message = OUT_OF_MEMORY.format(
            total=self._cache.total, tokens=self._batch.table.length(running.slot)
        )
        end(running, FinishReason("abort", message=message, status=500))
