"""A step on its way over the device, and what is read of it in the end."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...engine_core.ids import I32, I64, i32
from ...engine_core.plan import HostDrafts, RowLogprobs, StepPlan
from ..sampling.slot_processors import ProcessorWork
from .device_step import DeviceStep
from .marks import Mark
from .packer import Packed
from .rows_to_come import MaskWait


class Output(NamedTuple):
    """A step's output on the device, of so many ``rows`` and ``width`` (see DeviceStep).

    ``places``: which of its rows are the step's own, in their order.
    """

    out: torch.Tensor
    rows: int
    width: int
    places: slice | I64


@dataclass(slots=True)
class Launched:
    """A step on its way; its result is complete once ``done`` has passed.

    ``out``: its output on the host; ``verified``: its query tokens at most; ``illegal`` and
    ``forced``: see StepResult; ``mask_wait``: of steps in which the host has a say, ``work``: what
    custom processors did; for the others see Output.
    """

    plan: StepPlan
    drafts: HostDrafts | None
    packed: Packed
    out: I32
    rows: int
    width: int
    places: slice | I64
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


class Answer(NamedTuple):
    """A result's arrays: int32[R] and [R, width], and int32 bytes of R rows; ``confidence`` and
    ``trimmed`` as in StepResult."""

    lens: I32
    grid: I32
    proposed: bytes
    depths: bytes
    confidence: bytes
    trimmed: bytes


def read_answer(step: DeviceStep, launched: Launched) -> Answer:
    """The output's rows that are the step's own; its end must have passed."""
    packed, places, drafts = launched.packed, launched.places, launched.drafts
    out = step.split_output(torch.from_numpy(launched.out), launched.rows, launched.width)
    proposed = bytes(4 * packed.rows) if drafts is None else drafts.counts
    depths = packed.depths
    if out.proposed is not None and out.depths is not None:
        proposed = (i32(proposed) + out.proposed.numpy()[places]).tobytes()
        depths = depths + out.depths.numpy()[places]
    lens, grid = out.accept_lens.numpy()[places], out.tokens.numpy()[places]
    confidence = trimmed = b""
    if out.confidence is not None and packed.caps is not None:
        confidence = out.confidence.numpy()[places][packed.caps > 0].tobytes()
    if out.trimmed is not None:
        trimmed = out.trimmed.numpy()[places].tobytes()
    return Answer(lens, grid, proposed, depths.tobytes(), confidence, trimmed)
