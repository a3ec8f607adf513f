"""The waiting requests, in the order in which they should be admitted."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Literal, final

from .request import Waiting

LPM_QUEUE_LIMIT = 128  # beyond so many waiting requests prefixes are no longer compared
LPM_MAX_OVERTAKES = 64  # then the oldest request goes first, however short its cached prefix


@final
class WaitingQueue:
    """Arrival order inside a priority, or the longest cached prefix first.

    A retracted request keeps its arrival number, so it returns to its old place. Under "lpm" a
    request is overtaken a bounded number of times; nothing starves inside its priority.
    """

    def __init__(self, policy: Literal["fcfs", "lpm"], use_priority: bool) -> None:
        self._lpm = policy == "lpm"
        self._use_priority = use_priority
        self._items: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._items)

    def push(self, waiting: Waiting) -> None:
        """Add a new or retracted request."""
        insort(self._items, waiting, key=self._key)

    def remove(self, waiting: Waiting) -> None:
        """Take one out. Raises ValueError when it is not there."""
        at = bisect_left(self._items, self._key(waiting), key=self._key)
        if at == len(self._items) or self._items[at].request is not waiting.request:
            raise ValueError(f"request {waiting.request.rid} is not waiting")
        del self._items[at]

    def last(self) -> Waiting:
        """The request to be admitted last."""
        return self._items[-1]

    def next(self, cached_length: Callable[[Waiting], int]) -> Waiting:
        """Whom to admit now, of at least one; ``cached_length`` gives a cached prefix's tokens."""
        head = self._items[0]
        if not self._lpm or len(self._items) > LPM_QUEUE_LIMIT:
            return head
        if head.request.overtaken >= LPM_MAX_OVERTAKES:
            return head
        level = self._level(head)
        peers = [w for w in self._items if self._level(w) == level]
        return max(peers, key=lambda w: (cached_length(w), -w.request.arrival))

    def admitted(self, waiting: Waiting) -> None:
        """Take out a request that runs now, and count whom it overtook."""
        self.remove(waiting)
        if self._items and self._items[0].request.arrival < waiting.request.arrival:
            head = self._items[0]
            if self._level(head) == self._level(waiting):
                head.request.overtaken += 1

    def _level(self, waiting: Waiting) -> int:
        return -waiting.request.priority if self._use_priority else 0

    def _key(self, waiting: Waiting) -> tuple[int, int]:
        return (self._level(waiting), waiting.request.arrival)
