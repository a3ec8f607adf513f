"""Masks of a step on a GPU: made on the host while the target runs, once the step before is known.

Matchers stand where the latest collected result left them, so a step's masks are made when the step
before it was collected; until then its segment A waits.
"""

import time
from typing import NamedTuple

import numpy as np
import torch

from ...cython_ext.packed_rows import PackedRows
from ...engine_core.draft_caps import no_drafts
from ...engine_core.grammar_compiler import GrammarCompiler
from ...engine_core.ids import I32, i32
from ...engine_core.plan import HostDrafts, StepPlan
from ...engine_core.refusal import Refused
from ...kernels.logit_masks import DEAD, FREE
from ..sampling.slot_grammars import RowTokens, SlotGrammars
from .device_step import StepMasks
from .forced_ahead import ForcedAhead
from .pinned_ring import PinnedRing
from .rows_to_come import MaskWait


class StepDrafts(NamedTuple):
    """What the host knows of a step's drafts, None if it has none; for the rest see StepResult."""

    drafts: HostDrafts | None
    illegal: int = 0
    forced: bytes = b""


class GrammarSteps:
    """The grammars of a GPU's slots. ``device``: the GPU's, or a CPU's in Triton's interpreter.

    For reports: ``mask_nodes`` had masks so far, which took the host ``mask_ns``.
    """

    def __init__(
        self, compiler: GrammarCompiler, device: torch.device, forced: int | None = None
    ) -> None:
        """``forced``: see SlotGrammars."""
        self._grammars = SlotGrammars(compiler, forced)
        self._ahead = ForcedAhead(self._grammars)
        self._masks = PinnedRing(device.type == "cuda")
        self.mask_ns = self.mask_nodes = 0

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots, whose last steps are collected."""
        self._ahead.enter(plan)
        self._grammars.enter(plan)

    def reset(self) -> None:
        """Forget every slot."""
        self._ahead.reset()
        self._grammars.reset()

    def waits(self, plan: StepPlan) -> bool:
        """Whether a step had better see the one in flight first, for what may be forced then."""
        return self._grammars.concern(i32(plan.slots)) and self._ahead.worth_a_wait(plan)

    def start(
        self, plan: StepPlan, drafts: HostDrafts | None, on_device: bool, fixed: bool
    ) -> StepDrafts:
        """The drafts of a step that starts now: the host's without what grammars forbid, with what
        they force. ``on_device``: a drafter there fills the rows that are left; ``fixed``: all of
        them, come what may.
        """
        if not self._grammars.concern(i32(plan.slots)):
            return StepDrafts(drafts)
        made, illegal, forced = drafts or no_drafts(plan, on_device), 0, b""
        if not fixed:
            made, illegal, forced = self._grammars.sift(plan, made, self._ahead.tokens)
        counts, caps = i32(made.counts), i32(made.device_caps)
        self._ahead.started(plan, counts, forced, caps if len(caps) else np.zeros_like(counts))
        if drafts is None and not forced:
            return StepDrafts(None)
        return StepDrafts(made, illegal, forced)

    def fill(self, masks: StepMasks, packed: PackedRows, rows: RowTokens, wait: MaskWait) -> None:
        """Write the step's masks to the device; ``wait`` ends with the host's part."""
        began = time.perf_counter_ns()
        nodes = len(masks.places)
        host: torch.Tensor

        def new_block(count: int, words: int) -> I32:
            """Behind the places: one copy takes both."""
            nonlocal host
            host = self._masks.take(len(masks.block)).tensor[: nodes + count * words]
            made: I32 = host[nodes:].view(count, words).numpy()
            return made

        found = self._grammars.masks(packed.slots, packed.kinds.tobytes(), rows, new_block)
        places = host[:nodes].numpy()
        places.fill(FREE)
        places[found.nodes] = np.where(found.dead, DEAD, np.arange(len(found.nodes)))
        self.mask_ns += time.perf_counter_ns() - began
        self.mask_nodes += len(found.nodes)
        wait.end.record()
        masks.block[: len(host)].copy_(host, non_blocking=True)

    def advance(self, step: int, packed: PackedRows, lens: I32, emitted: I32) -> None:
        """Move over what a collected step's rows emitted: int32[R], and their tokens joined."""
        accept_cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        if self._grammars.concern(packed.slots):
            for slot, count in zip(packed.slots.tolist(), lens.tolist(), strict=True):
                self._ahead.emitted(slot, count)
        self._grammars.advance(packed.slots, accept_cu, emitted)
        self._ahead.moved(packed.slots, step)

    def refusal(self, slot: int) -> Refused | None:
        """Why the slot's request cannot go on, where its grammar is to blame."""
        return self._grammars.refusal(slot)
