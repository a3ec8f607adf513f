"""Follows the steps for a drafter on the device: who enters, what was drafted, what held."""

from typing import final

import numpy as np

from .device_lengths import DeviceLengths
from .draft_caps import device_caps
from .ids import I32, i32
from .plan import HostDrafts, StepPlan, StepResult


@final
class DeviceDrafts:
    """Tells the lengths of a drafter on the device what they learn from.

    ``alone``: no host drafter beside it, whose controller would watch the step times.
    """

    def __init__(self, lengths: DeviceLengths, alone: bool) -> None:
        self._lengths = lengths
        self._alone = alone
        self._bound: I32 = np.zeros(0, dtype=np.int32)  # caps of the newest late-bound step

    def plan_made(self, plan: StepPlan) -> None:
        """Take note of the requests that enter a slot."""
        for init in plan.inits:
            self._lengths.start(init.slot)

    def bound(self, drafts: HostDrafts) -> None:
        """Take note of what a late-bound step, the only one in flight, leaves to the device."""
        self._bound = i32(drafts.device_caps)

    def committed(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a result that was checked against its plan."""
        rows = plan.verify_rows
        caps = self._bound if plan.late_bound else device_caps(plan)
        drafted = bool(caps.any())
        if self._alone and rows == plan.num_rows and (drafted or not result.forced):
            # Prefill rows make a step another thing: on a GPU its kernels are launched one by one.
            # Forced drafts alone do so too: the drafter may have run beside them, for nobody.
            self._lengths.observe(result, rows if drafted else 0)
        if drafted and self._lengths.learns:
            watched = _watched(caps, plan, result)
            self._lengths.learn(i32(plan.slots), watched, i32(result.accept_lens))


def _watched(caps: I32, plan: StepPlan, result: StepResult) -> I32:
    """int32[R]: of drafts of up to ``caps`` int32[R], those whose fate says something."""
    if result.forced:  # a grammar's say nothing of the drafter's own
        caps = np.where(i32(result.forced) > 0, 0, caps).astype(np.int32)
    if plan.budget >= 0:
        return np.minimum(caps, i32(result.proposed))  # what was left out tells nothing
    if not plan.accept_caps:
        return caps
    watched, rows = np.zeros_like(caps), plan.verify_rows
    watched[:rows] = np.where(caps[:rows] > 0, i32(plan.accept_caps), 0)
    return watched
