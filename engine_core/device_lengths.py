"""Draft lengths of a drafter on the device, whose drafts the host never sees.

It learns from what came back of earlier steps: how many drafts a row had room for and how many of
them held. A request that looks hopeless is not watched for free, as a host drafter's is by shadow
proposals, so now and then a step drafts to see.

A draft model's forward passes take time of their own, which steps without drafts save: it is
measured by rows, beside T(batch tokens). Both are kept current by steps of either kind, so where
all of them draft, now and then one does not.
"""

from typing import Literal, final

import numpy as np

from .controller import NOT_PROFITABLE, TIMED_PLAIN, StepLengths, caps_by_room
from .draft_estimates import (
    MATCH_CONTEXT,
    MODEL_CONTEXT,
    ChainEstimates,
    Estimates,
    TreeEstimates,
)
from .ids import I32
from .plan import StepResult
from .step_times import StepTimes

PROBE_EVERY = 32  # steps of one kind until one of the other, at least
FIRST_PROBES = 8  # steps that draft to see, whatever they cost: enough to correct a measurement
_PROBE_SHARE = 0.01  # of the time, that further ones may cost where drafting takes time
_PLAIN_SHARE = 0.005  # the same of steps that do not draft
_MARGIN = 1.0  # what drafting must gain: nothing waits for it
_MODEL_MARGIN = 1.02  # the same where it takes time


@final
class DeviceLengths:
    """Lengths of up to ``width`` nodes a row; "fixed" drafts in full wherever it may.

    ``plan`` (or ``weigh`` and ``settle``) comes before each step, ``start`` once a slot has a new
    request, ``observe`` and ``learn`` with every result in order. ``times``: T(batch tokens), of
    steps without drafting if ``drafting``, seconds by rows that draft, is given; else of steps
    with it. ``trees``: the drafter's drafts branch, so its rows are never cut; nor are they where
    a planner ``trims`` what they verify, and knows each draft's own chances.
    """

    def __init__(
        self,
        times: StepTimes,
        max_slots: int,
        width: int,
        policy: Literal["auto", "fixed"] = "auto",
        drafting: StepTimes | None = None,
        trees: bool = False,
        trims: bool = False,
    ) -> None:
        self.times = times
        self.drafting = drafting
        self._fixed = policy == "fixed"
        self._width = width
        self._whole = trims
        self._margin = _MARGIN if drafting is None else _MODEL_MARGIN
        self._estimates: Estimates
        if trees:
            self._estimates = TreeEstimates(max_slots, max(1, width))
        else:
            context = MATCH_CONTEXT if drafting is None else MODEL_CONTEXT
            together = drafting is not None
            self._estimates = ChainEstimates(max_slots, max(1, width), context, together)
        self._without = 0  # steps that could have drafted, and did not, since one did
        self._with = 0  # steps of decoding alone that drafted since one did not
        self._probes = 0

    @property
    def learns(self) -> bool:
        """Whether ``learn`` has any use."""
        return not self._fixed

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self._estimates.start(slot)

    def plan(self, slots: I32, room: I32, batch_tokens: int) -> StepLengths:
        """Choose caps for the verify rows of a step (see ``LengthController.plan``)."""
        return self.settle(self.weigh(slots, room, batch_tokens), slots, room, batch_tokens)

    def weigh(self, slots: I32, room: I32, batch_tokens: int) -> StepLengths:
        """What estimates say of a step, which may not come to be: nothing is counted."""
        caps, reasons, drafting = caps_by_room(room, self._width)
        if self._fixed or not drafting:
            return StepLengths(False, caps, reasons)
        chosen, gain = self._estimates.choose(
            slots, caps, batch_tokens, self.times.table, self._extra(len(slots)), self._margin
        )
        if self._whole and chosen.any():
            chosen = caps
        if not chosen.all():
            reasons[(caps > 0) & (chosen == 0)] = NOT_PROFITABLE
        return StepLengths(False, chosen, reasons, gain)

    def settle(self, lengths: StepLengths, slots: I32, room: I32, batch_tokens: int) -> StepLengths:
        """The lengths of a step that comes to be: ``weigh``'s, or a probe's when one is due."""
        if self._fixed:
            return lengths
        if lengths.caps.any():
            self._without = 0
            return self._or_plain(lengths, batch_tokens)
        self._with = 0
        caps, reasons, drafting = caps_by_room(room, self._width)
        if not drafting:
            return lengths
        self._without += 1
        if self.drafting is not None and self._without % PROBE_EVERY == 0:
            self._estimates.fade(slots)
        if self._without < self._drafting_due(caps, batch_tokens):
            return lengths
        self._without = 0
        self._probes += 1
        return StepLengths(False, caps, reasons)

    def observe(self, result: StepResult, drafting_rows: int) -> None:
        """Learn times from a result, of a step in which so many rows could draft."""
        if self.drafting is None or not drafting_rows:
            self.times.observe(result.batch_tokens, result.busy_ns)
            return
        if result.busy_ns <= 0 or not result.batch_tokens:
            return
        # What a step was slower than measured touches both parts of it alike.
        measured = self.times.measured(result.batch_tokens) + self.drafting.measured(drafting_rows)
        ratio = result.busy_ns * 1e-9 / measured
        self.times.note(result.batch_tokens, ratio)
        self.drafting.note(drafting_rows, ratio)

    def learn(self, slots: I32, caps: I32, accept_lens: I32) -> None:
        """Learn from a step's rows: drafts that there was room for, and what they emitted.

        All int32[R]; rows with a cap of 0 teach nothing.
        """
        if not self.learns:
            return
        rows = np.flatnonzero(caps)
        if len(rows) < len(caps):
            slots, caps, accept_lens = slots[rows], caps[rows], accept_lens[rows]
        if len(rows):
            self._estimates.learn(slots, caps, np.maximum(accept_lens - 1, 0))

    def _extra(self, rows: int) -> float:
        return 0.0 if self.drafting is None else self.drafting.seconds(rows)

    def _or_plain(self, lengths: StepLengths, batch_tokens: int) -> StepLengths:
        """A step without drafts instead, where the time of such steps was not seen for long."""
        caps = lengths.caps
        if self.drafting is None or batch_tokens != len(caps):
            return lengths
        self._with += 1
        if self._with < max(PROBE_EVERY, (1.0 - 1.0 / lengths.gain) / _PLAIN_SHARE):
            return lengths
        self._with = 0
        reasons = np.where(caps > 0, TIMED_PLAIN, lengths.reasons).astype(np.uint8)
        return StepLengths(False, np.zeros_like(caps), reasons)

    def _drafting_due(self, caps: I32, batch_tokens: int) -> float:
        """Steps without drafts until one drafts: it may lose the time that it takes."""
        if self.drafting is None or self._probes < FIRST_PROBES:
            return PROBE_EVERY
        plain = self.times.seconds(batch_tokens)
        full = self.times.seconds(batch_tokens + int(caps.sum())) + self._extra(len(caps))
        return max(PROBE_EVERY, (full / plain - 1.0) / _PROBE_SHARE)
