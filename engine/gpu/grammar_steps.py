"""Masks of a step on a GPU: made on the host while the target runs, once the step before is known.

Matchers stand where the latest collected result left them, so a step's masks are made when the step
before it was collected; until then its segment A waits.
"""

import time

import numpy as np
import torch

from ...engine_core.grammar_compiler import GrammarCompiler
from ...engine_core.ids import I32
from ...engine_core.plan import HostDrafts, StepPlan
from ...engine_core.refusal import Refused
from ...kernels.logit_masks import DEAD, FREE
from ..sampling.slot_grammars import RowTokens, SiftedDrafts, SlotGrammars
from .device_step import StepMasks
from .packer import Packed
from .pinned_ring import PinnedRing
from .rows_to_come import MaskWait


class GrammarSteps:
    """The grammars of a GPU's slots. ``device``: the GPU's, or a CPU's in Triton's interpreter.

    For reports: ``mask_nodes`` had masks so far, which took the host ``mask_ns``.
    """

    def __init__(self, compiler: GrammarCompiler, device: torch.device) -> None:
        self._grammars = SlotGrammars(compiler)
        self._masks = PinnedRing(device.type == "cuda")
        self.mask_ns = self.mask_nodes = 0

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots, whose last steps are collected."""
        self._grammars.enter(plan)

    def reset(self) -> None:
        """Forget every slot."""
        self._grammars.reset()

    def sift(self, plan: StepPlan, drafts: HostDrafts) -> SiftedDrafts:
        """The host's drafts without what grammars forbid, with what they force."""
        return self._grammars.sift(plan, drafts)

    def fill(self, masks: StepMasks, packed: Packed, rows: RowTokens, wait: MaskWait) -> None:
        """Write the step's masks to the device; ``wait`` ends with the host's part."""
        began = time.perf_counter_ns()
        nodes = len(masks.places)
        host: torch.Tensor

        def new_block(count: int, words: int) -> I32:
            """Behind the places: one copy takes both."""
            nonlocal host
            host = self._masks.take(len(masks.block))[: nodes + count * words]
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

    def advance(self, packed: Packed, lens: I32, emitted: I32) -> None:
        """Move over what a collected step's rows emitted: int32[R], and their tokens joined."""
        accept_cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        self._grammars.advance(packed.slots, accept_cu, emitted)

    def refusal(self, slot: int) -> Refused | None:
        """Why the slot's request cannot go on, where its grammar is to blame."""
        return self._grammars.refusal(slot)
