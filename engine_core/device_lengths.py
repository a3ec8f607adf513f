"""Draft lengths of a drafter on the device, whose drafts the host never sees.

It learns from what came back of earlier steps: how many drafts a row proposed and how many of
them held. A request that looks hopeless is not watched for free, as a host drafter's is by shadow
proposals, so now and then a step drafts to see (``PROBE_EVERY``).
"""

from typing import Literal, final

import numpy as np

from ..cython_ext.length_policy import LengthPolicy
from .controller import NOT_PROFITABLE, StepLengths, blocked_reasons
from .ids import I32
from .plan import StepResult
from .step_times import StepTimes

PROBE_EVERY = 32  # steps without drafts until one drafts in full
_GAIN = 1.0  # what drafting must gain: nothing waits for it
_CONTEXT = 4  # matched tokens that the first estimates assume


@final
class DeviceLengths:
    """Lengths of chains of up to ``width`` nodes; "fixed" drafts in full wherever it may.

    ``plan`` (or ``weigh`` and ``settle``) comes before each step, ``start`` once a slot has a new
    request, ``observe`` and ``learn`` with every result in order. Estimates are by depth, over all
    requests, with a factor for each.
    """

    def __init__(
        self,
        times: StepTimes,
        max_slots: int,
        width: int,
        policy: Literal["auto", "fixed"] = "auto",
    ) -> None:
        self.times = times
        self._fixed = policy == "fixed"
        self._width = width
        self._policy = LengthPolicy(max_slots, max(1, width))
        self._chain = np.arange(max(1, width), dtype=np.int32)
        shape = (max_slots, len(self._chain))
        self._chains = np.ascontiguousarray(np.broadcast_to(self._chain, shape))
        self._weights = np.ones(shape, dtype=np.float32)
        self._counts = np.full(max_slots, width, dtype=np.int32)
        self._contexts = np.full(max_slots, _CONTEXT, dtype=np.int32)
        self._without = 0  # steps that could have drafted, and did not, since one did

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self._policy.start(slot)
        self._offer(np.array([slot], dtype=np.int32))

    def plan(self, slots: I32, room: I32, batch_tokens: int) -> StepLengths:
        """Choose caps for the verify rows of a step (see ``LengthController.plan``)."""
        return self.settle(self.weigh(slots, room, batch_tokens), room)

    def weigh(self, slots: I32, room: I32, batch_tokens: int) -> StepLengths:
        """What estimates say of a step, which may not come to be: nothing is counted."""
        caps = self._caps(room)
        reasons = blocked_reasons(room, caps)
        if self._fixed or not caps.any():
            return StepLengths(False, caps, reasons)
        chosen, gain = self._choose(slots, caps, batch_tokens)
        reasons[(caps > 0) & (chosen == 0)] = NOT_PROFITABLE
        return StepLengths(False, chosen, reasons, gain)

    def settle(self, lengths: StepLengths, room: I32) -> StepLengths:
        """The lengths of a step that comes to be: ``weigh``'s, or a probe's when one is due."""
        if lengths.caps.any():
            self._without = 0
            return lengths
        caps = self._caps(room)
        if not caps.any():
            return lengths
        self._without += 1
        if self._without < PROBE_EVERY:
            return lengths
        self._without = 0
        return StepLengths(False, caps, blocked_reasons(room, caps))

    def _caps(self, room: I32) -> I32:
        return np.minimum(np.maximum(room, 0), self._width)

    def observe(self, result: StepResult) -> None:
        """Learn T(batch tokens) from a result."""
        self.times.observe(result.batch_tokens, result.busy_ns)

    def learn(self, slots: I32, caps: I32, accept_lens: I32) -> None:
        """Learn from a step's rows: drafts that there was room for, and what they emitted.

        All int32[R]; rows with a cap of 0 teach nothing.
        """
        rows = np.flatnonzero(caps)
        if self._fixed or not len(rows):
            return
        slots = slots[rows]
        held = np.maximum(accept_lens[rows] - 1, 0)
        # Chains of node numbers stand for drafts that the host does not know: what held is a run
        # of them, and a run that ended before the cap ends with a token that no node has.
        lens = held + (held < caps[rows])
        runs = np.where(self._chain < held[:, None], self._chain, -1)
        emitted = runs[self._chain < lens[:, None]]
        self._policy.learn(slots, lens.astype(np.int32), np.ascontiguousarray(emitted))
        self._offer(slots)

    def _choose(self, slots: I32, caps: I32, batch_tokens: int) -> tuple[I32, float]:
        """Drafts of each row, int32[V], and what they gain over none."""
        kept, _, gain = self._policy.select(
            slots, caps, batch_tokens, len(slots), self.times.table, 0.0, 0.0, False
        )
        counts = np.zeros(len(slots), dtype=np.int32)
        nodes = np.empty((2, kept), dtype=np.int32)
        self._policy.write(slots, counts, nodes[0], nodes[1])
        return (counts, gain) if gain > _GAIN else (np.zeros_like(counts), 1.0)

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
