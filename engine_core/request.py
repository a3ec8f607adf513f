"""A request and the states it passes: ``Waiting | Running | Draining | Finished``.

::

    Waiting --admit--> Running --leave(step)--> Draining --settle--> Finished | Waiting

A request leaves its slot when it finished or was retracted; while one of its rows may be in
flight it drains. Retracted, its rows in flight still commit; finished, they count nowhere.
"""

from dataclasses import dataclass
from typing import final

import numpy as np

from .commit import Progress
from .ids import I32, RequestId, SlotId, i32
from .lease import Lease
from .messages import GenerateRequest


@final
class Request:
    """What stays the same over all states, and the progress that :mod:`commit` makes.

    ``arrival`` numbers requests by their coming. ``max_total``: prompt and output tokens at which
    the request ends. ``stop_ids``: what the sampler masks until ``min_new_tokens``.
    """

    __slots__ = (
        "arrival",
        "max_total",
        "overtaken",
        "params",
        "priority",
        "progress",
        "prompt",
        "rid",
        "salt",
        "seed",
        "speculative",
        "stop_ids",
        "stream",
    )

    def __init__(
        self, message: GenerateRequest, arrival: int, seed: int, max_total: int, progress: Progress
    ) -> None:
        self.rid = RequestId(message.rid)
        self.prompt = i32(message.prompt)
        self.params = message.params
        self.priority = message.priority
        self.salt = message.cache_salt
        self.stream = message.stream
        self.speculative = message.speculative
        self.arrival = arrival
        self.seed = seed
        self.max_total = max_total
        self.progress = progress
        self.stop_ids = tuple(sorted(progress.stop_ids))
        self.overtaken = 0

    @property
    def generates(self) -> bool:
        """Whether it asks for any token; else only its KV is computed."""
        return self.max_total > len(self.prompt)

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.progress.tokens)

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt) + len(self.progress.tokens)

    @property
    def cacheable(self) -> int:
        """Most tokens whose KV may come from the cache: one at least is computed."""
        scores = self.progress.prompt_scores
        limit = None if scores is None else scores.cacheable
        return self.length - 1 if limit is None else limit

    def tokens(self) -> I32:
        """Prompt and output so far, int32[length]."""
        if not self.progress.tokens:
            return self.prompt
        return np.concatenate((self.prompt, np.array(self.progress.tokens, dtype=np.int32)))


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue; owns neither slot nor pages."""

    request: Request

    def __post_init__(self) -> None:
        _require(self.request.progress.finish is None, "a finished request cannot wait")

    def admit(self, slot: SlotId, serial: int, lease: Lease) -> "Running":
        """Enter a slot."""
        return Running(self.request, slot, serial, lease)


@final
@dataclass(frozen=True, slots=True)
class Running:
    """In a slot; steps may have rows of it. ``serial`` numbers the occupants of all slots."""

    request: Request
    slot: SlotId
    serial: int
    lease: Lease

    def __post_init__(self) -> None:
        _require(not self.lease.released, "a running request needs its lease")

    def leave(self, last_step: int) -> "Draining":
        """Get no new rows; ``last_step`` is the last one with a row."""
        return Draining(self.request, self.slot, self.lease, last_step)


@final
@dataclass(frozen=True, slots=True)
class Draining:
    """In a slot until the result of ``step`` is in."""

    request: Request
    slot: SlotId
    lease: Lease
    step: int

    def __post_init__(self) -> None:
        _require(not self.lease.released, "a draining request needs its lease")

    @property
    def retracted(self) -> bool:
        """Whether it will wait again."""
        return self.request.progress.finish is None

    def settle(self) -> "Waiting | Finished":
        """Leave the slot, after the lease was released."""
        _require(self.lease.released, "a request settles after its lease is released")
        return Waiting(self.request) if self.retracted else Finished(self.request)


@final
@dataclass(frozen=True, slots=True)
class Finished:
    """Done; owns nothing."""

    request: Request

    def __post_init__(self) -> None:
        _require(self.request.progress.finish is not None, "a finished request has a reason")


RequestState = Waiting | Running | Draining | Finished


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
