"""A step on its way over the device, and what is read of it in the end."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...cython_ext.packed_rows import PackedRows, StepAnswer
from ...engine_core.ids import I32
from ...engine_core.plan import RowLogprobs, StepPlan
from ..sampling.slot_processors import ProcessorWork
from .device_step import DeviceStep
from .marks import Mark
from .rows_to_come import MaskWait


class Output(NamedTuple):
    """A step's output on the device, of so many ``rows`` and ``width`` (see DeviceStep).

    ``gap``: rows of padding that stand before the step's prefill rows.
    """

    out: torch.Tensor
    rows: int
    width: int
    gap: int


@dataclass(slots=True)
class Launched:
    """A step on its way; its result is complete once ``done`` has passed.

    ``out``: its output on the host; ``verified``: its query tokens at most; ``illegal`` and
    ``forced``: see StepResult; ``mask_wait``: of steps in which the host has a say, ``work``: what
    custom processors did; for the others see Output.
    """

    plan: StepPlan
    packed: PackedRows
    out: I32
    rows: int
    width: int
    gap: int
    began: Mark
    done: Mark
    logprobs: tuple[RowLogprobs, ...]
    prompt_logprobs: tuple[RowLogprobs, ...]
    wait_ns: int
    verified: int
    illegal: int = 0
    forced: bytes = b""
    mask_wait: MaskWait | None = None
    work: ProcessorWork | None = None

    def mask_wait_ns(self) -> int:
        """For how long the device stood and waited for the host; the end must have passed."""
        if self.mask_wait is None:
            return 0
        return int(self.mask_wait.begin.elapsed_time(self.mask_wait.end) * 1e6)


def read_answer(step: DeviceStep, launched: Launched) -> StepAnswer:
    """What the output says of the step's rows; its end must have passed."""
    drafted, gamma, trims = step.drafts(launched.width), 0, False
    if drafted and step.ragged is not None:
        gamma, trims = step.ragged.gamma, step.ragged.caps
    return launched.packed.read(
        launched.out, launched.rows, launched.width, launched.gap, drafted, gamma, trims
    )
