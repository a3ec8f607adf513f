"""Lengths where a host drafter and one on the device draft for the same requests.

A step is late-bound where the host's trees promise at least what the device's drafts do; in it the
device drafts for the rows that the host has nothing for. Other steps are the device's alone.
"""

from typing import final

import numpy as np

from .controller import BoundDrafts, LengthController, StepLengths
from .device_lengths import DeviceLengths
from .ids import F32, I32
from .plan import StepResult


@final
class MixedLengths:
    """The policy of late drafts (see :mod:`controller`) over both controllers, of one policy."""

    def __init__(self, host: LengthController, device: DeviceLengths) -> None:
        self._host = host
        self._device = device

    def start(self, slot: int) -> None:
        """A new request enters the slot."""
        self._host.start(slot)

    def plan(self, slots: I32, room: I32, batch_tokens: int) -> StepLengths:
        """Whether the step waits for the host, and draft caps of its verify rows."""
        late = self._host.plan(slots, room, batch_tokens)
        if late.late_bound and late.gain == 1.0:  # fixed: the host goes first
            return late
        now = self._device.weigh(slots, room, batch_tokens)
        if late.late_bound and late.gain >= now.gain:
            return late
        return self._device.settle(now, slots, room, batch_tokens)

    def offer(
        self, slots: I32, counts: I32, match_lens: I32, tokens: I32, parents: I32, weights: F32
    ) -> None:
        """Take the host's trees."""
        self._host.offer(slots, counts, match_lens, tokens, parents, weights)

    def bind(self, slots: I32, caps: I32, batch_tokens: int, verify_rows: int) -> BoundDrafts:
        """Choose the host's nodes, and room for the device's drafts in the rows that got none."""
        bound = self._host.bind(slots, caps, batch_tokens, verify_rows)
        room = np.where(bound.counts == 0, caps, 0).astype(np.int32)
        device_caps = np.zeros_like(room)
        if room.any():
            tokens = batch_tokens + len(bound.tokens)
            lengths = self._device.plan(slots[:verify_rows], room[:verify_rows], tokens)
            device_caps[:verify_rows] = lengths.caps
            bound.reasons[device_caps > 0] = 0
        return bound._replace(device_caps=device_caps)

    def learn(self, slots: I32, lens: I32, tokens: I32) -> None:
        """Compare the host's trees with what rows emitted."""
        self._host.learn(slots, lens, tokens)

    def observe(self, result: StepResult, decode_only: bool) -> None:
        """Learn times from a result, of verify rows alone or not."""
        self._host.observe(result, decode_only)
