"""How many drafts of a drafter on the device will hold, learned from what came back of it."""

from typing import NamedTuple, Protocol, final

import numpy as np

from ..cython_ext.length_policy import LengthPolicy
from .ids import I32
from .step_times import F64

MATCH_CONTEXT = 4  # matched tokens that the first estimates of a drafter without a model assume:
MODEL_CONTEXT = 9  # a node holds in one case of two; here, with a draft model, in three of four

_PRIOR_TRIES = 6.0  # weight of what is assumed of a width, in rows
_MAX_TRIES = 800.0  # counts are halved here, so that they follow the traffic
_SLOT_PRIOR = 5.0  # weight of "this request is like the others", in drafts
_SLOT_DECAY = 0.96  # a request's own counts fade by this factor a row
_FADE = 0.5
_PRIOR_HELD = 2.0  # drafts of a tree that hold, until it is known,
_PRIOR_SHARE = 0.7  # or so much of a tree that is cut to few nodes


class Choice(NamedTuple):
    """Drafts of each row, int32[V], and tokens per second over those without any (1.0: none)."""

    counts: I32
    gain: float


class Estimates(Protocol):
    """Expected drafts that hold, by request and length."""

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        ...

    def fade(self, slots: I32) -> None:
        """The requests, int32[V], were not watched for a while: they may be like others by now."""
        ...

    def choose(
        self, slots: I32, caps: I32, batch_tokens: int, times: F64, extra: float, margin: float
    ) -> Choice:
        """Drafts that make emitted tokens per second greatest, or none where it gains less than
        ``margin``.

        ``caps`` int32[V]: most drafts of a row. ``batch_tokens``: the step's tokens without any.
        ``times`` float64[N + 1]: seconds by batch tokens; drafting takes ``extra`` on top.
        """
        ...

    def learn(self, slots: I32, caps: I32, held: I32) -> None:
        """Of up to ``caps`` drafts of each row ``held`` did; all int32[R], caps at least 1."""
        ...


@final
class ChainEstimates:
    """For chains: acceptance by depth, over all requests, with a factor for each.

    A row's chain may be cut where the rest is not worth its tokens. ``together``: drafting costs
    time whatever its length, so if one row drafts, every row that may drafts something.
    """

    def __init__(self, max_slots: int, width: int, context: int, together: bool) -> None:
        self._policy = LengthPolicy(max_slots, width)
        self._together = together
        # Chains of node numbers stand for drafts that the host does not know.
        shape = (max_slots, width)
        chain = np.arange(width, dtype=np.int32)
        self._chains = np.ascontiguousarray(np.broadcast_to(chain, shape))
        self._weights = np.ones(shape, dtype=np.float32)
        self._counts = np.full(max_slots, width, dtype=np.int32)
        self._contexts = np.full(max_slots, context, dtype=np.int32)

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self._policy.start(slot)
        self._offer(np.array([slot], dtype=np.int32))

    def fade(self, slots: I32) -> None:
        """See ``Estimates``."""
        self._policy.fade(slots, _FADE)
        self._offer(slots)

    def choose(
        self, slots: I32, caps: I32, batch_tokens: int, times: F64, extra: float, margin: float
    ) -> Choice:
        """See ``Estimates``."""
        rows = len(slots)
        _, _, gain = self._policy.select(slots, caps, batch_tokens, rows, times, 0.0, extra, False)
        if gain <= margin:
            return Choice(np.zeros(rows, dtype=np.int32), 1.0)
        counts = self._policy.kept_of(rows)
        if self._together:
            np.maximum(counts, np.minimum(caps, 1), out=counts)
        return Choice(counts, gain)

    def learn(self, slots: I32, caps: I32, held: I32) -> None:
        """See ``Estimates``."""
        self._policy.learn_held(slots, caps, held)
        self._offer(slots)

    def _offer(self, slots: I32) -> None:
        """Renew the slots' estimates."""
        rows = len(slots)
        self._policy.offer(
            slots,
            self._counts[:rows],
            self._contexts[:rows],
            self._chains[:rows],
            self._chains[:rows],
            self._weights[:rows],
        )


@final
class TreeEstimates:
    """For trees, whose shape the host does not know: drafts that hold by width, all or nothing."""

    def __init__(self, max_slots: int, width: int) -> None:
        self._held = np.zeros(width + 1, dtype=np.float64)
        self._tries = np.zeros(width + 1, dtype=np.float64)
        self._hits = np.zeros(max_slots, dtype=np.float64)
        self._expected = np.zeros(max_slots, dtype=np.float64)
        self._means = self._mean_by_width()

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self._hits[slot] = self._expected[slot] = 0.0

    def fade(self, slots: I32) -> None:
        """See ``Estimates``."""
        self._hits[slots] *= _FADE
        self._expected[slots] *= _FADE

    def estimates(self, slots: I32, caps: I32) -> F64:
        """Drafts expected to hold of each row's ``caps``, float64[V]."""
        factor = (self._hits[slots] + _SLOT_PRIOR) / (self._expected[slots] + _SLOT_PRIOR)
        return np.minimum(self._means[caps] * factor, caps)

    def choose(
        self, slots: I32, caps: I32, batch_tokens: int, times: F64, extra: float, margin: float
    ) -> Choice:
        """See ``Estimates``."""
        rows, nodes = len(slots), int(caps.sum())
        none = Choice(np.zeros_like(caps), 1.0)
        if not nodes:
            return none
        held = float(self.estimates(slots, caps).sum())
        plain = rows / _seconds(times, rows)
        rate = (rows + held) / (_seconds(times, rows + nodes) + extra)
        gain = rate / plain
        if gain > 1.0 and batch_tokens > rows:
            # Beside prefill drafts must earn what a decode-only step would emit in their time.
            added = _seconds(times, batch_tokens + nodes) - _seconds(times, batch_tokens) + extra
            gain = 1.0 + (held - rate * added) / rows
        return Choice(caps, gain) if gain > margin else none

    def learn(self, slots: I32, caps: I32, held: I32) -> None:
        """See ``Estimates``."""
        promised = self._means[caps]
        self._hits[slots] = self._hits[slots] * _SLOT_DECAY + held
        self._expected[slots] = self._expected[slots] * _SLOT_DECAY + promised
        np.add.at(self._held, caps, held)
        np.add.at(self._tries, caps, 1.0)
        full = self._tries > _MAX_TRIES
        self._held[full] *= 0.5
        self._tries[full] *= 0.5
        self._means = self._mean_by_width()

    def _mean_by_width(self) -> F64:
        widths = np.arange(len(self._tries), dtype=np.float64)
        prior = np.minimum(_PRIOR_HELD, _PRIOR_SHARE * widths)
        whole = (self._held[-1] + _PRIOR_TRIES * prior[-1]) / (self._tries[-1] + _PRIOR_TRIES)
        prior = np.minimum(whole, _PRIOR_SHARE * widths)
        means: F64 = (self._held + _PRIOR_TRIES * prior) / (self._tries + _PRIOR_TRIES)
        means[-1] = whole
        return means


def _seconds(times: F64, tokens: int) -> float:
    last = len(times) - 1
    if tokens <= last:
        return float(times[tokens])
    return float(times[last] + (times[last] - times[last - 1]) * (tokens - last))
