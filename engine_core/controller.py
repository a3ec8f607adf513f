"""Draft lengths: how many draft nodes each row verifies, and when none at all.

Both decisions are deterministic functions of past results and recorded times, so a trace replays.
The scheduler's calls, in order, for the step n+1 that is planned while step n runs:

1. ``plan(slots, room, batch_tokens)``, at plan time, for the step's verify rows: whether the step
   is late-bound (waits for drafts) and each row's draft cap (``q_caps = 1 + caps``). It judges by
   the trees offered after step n-1 or earlier.
2. After ``collect`` of step n: ``learn(slots, lens, tokens)`` with its rows, ``observe``.
3. ``offer(...)`` the drafter's trees for the rows that go on, made from the text that includes
   step n. If step n+1 is late-bound, then ``bind(slots, caps, batch_tokens, verify_rows)``
   says which nodes to verify and the drafts are uploaded. If it is not, the offer is a *shadow
   proposal*: step n+1's tokens, which the target emits anyway, show what it would have been worth.
   Shadows cost no verify and are off the critical path, so they come after step n+2 is planned
   and launched.

``start(slot)`` comes before a slot's first ``offer``. Rows without drafts get a reason code;
``REASONS[code]`` is the text for ``spec_off_reason``.

The policy "auto" maximises (rows + expected accepted drafts) / (T(query tokens) + overhead).
Expected acceptance is additive over nodes (the accepted drafts are the nodes on the accepted
path), a child's is never above its parent's, so the best k nodes of all rows together are closed
under parents, and one sort finds the best k. A node's estimate comes from cells (matched context,
frequency share, rank among siblings, level) learned over all requests and a factor learned for
its own request. "fixed" verifies all that was proposed.
"""

from collections import deque
from typing import Literal, NamedTuple, final

import numpy as np

from ..cython_ext.length_policy import LengthPolicy, row_caps
from .ids import F32, I32, U8
from .plan import StepResult
from .step_times import StepTimes

DRAFTS = 0
OFF_BY_REQUEST = 1
NO_ROOM = 2
NO_PROPOSAL = 3
NOT_PROFITABLE = 4
NO_MATCH = 5
TIMED_PLAIN = 6
OVER_BUDGET = 7

REASONS: tuple[str | None, ...] = (
    None,
    "request switched it off",
    "no room for drafts before the length cap",
    "no proposal yet",
    "not profitable at this batch size",
    "no match",
    "a step without drafts, now and then, to time it",
    "no draft was worth its verification",
)

_BY_OFFER: U8 = np.array([NO_PROPOSAL, NO_MATCH, NOT_PROFITABLE], dtype=np.uint8)

LATE_SECONDS = 250e-6  # cost of a late-bound step until results have shown it
PLAN_MARGIN = 1.02  # a step is made late only for a gain above this


class StepLengths(NamedTuple):
    """Answer at plan time. ``caps`` int32[V] draft nodes a row, ``reasons`` uint8[V].

    ``gain``: tokens per second over those without drafts, as estimated; 1.0 if nothing was.
    """

    late_bound: bool
    caps: I32
    reasons: U8
    gain: float = 1.0


class RowCaps(NamedTuple):
    """Draft caps of rows by their room alone, int32[V], why rows may not draft at all, uint8[V] (0
    where they may), and how many may.
    """

    caps: I32
    reasons: U8
    drafting: int


def caps_by_room(room: I32, width: int) -> RowCaps:
    """Caps of rows that may have up to ``width`` drafts, by their ``room`` (see ``plan``)."""
    return RowCaps(*row_caps(room, width, OFF_BY_REQUEST, NO_ROOM))


class BoundDrafts(NamedTuple):
    """Answer at bind time, aligned with the rows asked for: :class:`HostDrafts`' arrays.

    ``reasons`` uint8[R]: why a row has no drafts (0 where it has some). ``device_caps`` int32[R],
    None without a drafter on the device.
    """

    counts: I32
    tokens: I32
    parents: I32
    reasons: U8
    device_caps: I32 | None = None


@final
class LengthController:
    """One for all requests; ``width`` is the most draft nodes of a row (draft_width - 1)."""

    def __init__(
        self,
        times: StepTimes,
        max_slots: int,
        width: int,
        policy: Literal["auto", "fixed"] = "auto",
        late_seconds: float = LATE_SECONDS,
    ) -> None:
        self.times = times
        self.late_seconds = late_seconds
        self._fixed = policy == "fixed"
        self._policy = LengthPolicy(max_slots, max(1, width))
        self._width = width
        self._waits = deque[int](maxlen=15)

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self._policy.start(slot)

    def plan(self, slots: I32, room: I32, batch_tokens: int) -> StepLengths:
        """Choose caps for the verify rows of a step and whether it waits for drafts.

        ``slots`` int32[V]. ``room`` int32[V]: most drafts the row may hold; 0 near its length
        cap, -1 where the request switched drafting off. ``batch_tokens``: the step's query
        tokens without any draft (V and the prefill tokens).
        """
        caps, reasons, drafting = caps_by_room(room, self._width)
        if self._fixed:
            return StepLengths(drafting > 0, caps, reasons)
        _, _, gain = self._policy.select(
            slots, caps, batch_tokens, len(slots), self.times.table, 0.0, self.late_seconds, False
        )
        if gain > PLAN_MARGIN:
            return StepLengths(True, caps, reasons, gain)
        reasons = np.where(caps > 0, self._plain_reasons(slots), reasons)
        return StepLengths(False, np.zeros_like(caps), reasons)

    def offer(
        self,
        slots: I32,
        counts: I32,
        match_lens: I32,
        tokens: I32,
        parents: I32,
        weights: F32,
    ) -> None:
        """Take the trees that continue the slots' committed text.

        ``counts`` and ``match_lens`` int32[R]; ``tokens``, ``parents`` int32[R, N] and
        ``weights`` float32[R, N] as ``NgramTrie.propose`` writes them (breadth-first, parent 0 =
        the bonus token, siblings best first, weight = frequency share of the path).
        """
        self._policy.offer(slots, counts, match_lens, tokens, parents, weights)

    def bind(self, slots: I32, caps: I32, batch_tokens: int, verify_rows: int) -> BoundDrafts:
        """Choose the nodes that a late-bound step verifies, of trees offered since ``learn``.

        ``slots`` and ``caps`` int32[R]: every row of the step, cap 0 for rows that may not draft
        (prefill rows among them). ``batch_tokens`` as for ``plan``; ``verify_rows`` of its rows
        are verify rows.
        """
        if self._fixed:
            kept = self._policy.select_all(slots, caps)
        else:
            kept, _, _ = self._policy.select(
                slots, caps, batch_tokens, verify_rows, self.times.table,
                self.late_seconds, 0.0, True,
            )  # fmt: skip
        counts = np.zeros(len(slots), dtype=np.int32)
        tokens = np.zeros(kept, dtype=np.int32)
        parents = np.zeros(kept, dtype=np.int32)
        self._policy.write(slots, counts, tokens, parents)
        reasons = np.zeros(len(slots), dtype=np.uint8)
        plain = (caps > 0) & (counts == 0)
        if plain.any():
            reasons[plain] = self._plain_reasons(slots)[plain]
        return BoundDrafts(counts, tokens, parents, reasons)

    def _plain_reasons(self, slots: I32) -> U8:
        offered = np.empty(len(slots), dtype=np.int32)
        self._policy.offered(slots, offered)
        return _BY_OFFER[np.clip(offered, -1, 1) + 1]

    def learn(self, slots: I32, lens: I32, tokens: I32) -> None:
        """Compare offered trees with what rows emitted: ``lens`` int32[R], ``tokens`` joined."""
        self._policy.learn(slots, lens, tokens)

    def observe(self, result: StepResult, decode_only: bool) -> None:
        """Learn times from a result: T(batch tokens), and what waiting for drafts cost.

        ``decode_only``: the step had verify rows alone. One with prefill rows says nothing of
        T: on a GPU its kernels are launched one by one.
        """
        if decode_only:
            self.times.observe(result.batch_tokens, result.busy_ns)
        if result.wait_ns > 0:
            self._waits.append(result.wait_ns)
            self.late_seconds = sorted(self._waits)[len(self._waits) // 2] * 1e-9
