"""Masks of a step on a GPU: made on the host while the target runs, once the step before is known.

Matchers stand where the latest collected result left them, so a step's masks are made when the step
before it was collected; until then its segment A waits.
"""

import numpy as np
import torch

from ...engine_core.grammar_compiler import GrammarCompiler
from ...engine_core.ids import I32
from ...engine_core.plan import HostDrafts, StepPlan
from ...engine_core.refusal import Refused
from ...kernels.logit_masks import allow_all
from ..sampling.slot_grammars import RowTokens, SiftedDrafts, SlotGrammars
from .packer import Packed
from .pinned_ring import PinnedRing


class GrammarSteps:
    """The grammars of a GPU's slots. ``device``: the GPU's, or a CPU's in Triton's interpreter."""

    def __init__(self, compiler: GrammarCompiler, device: torch.device) -> None:
        self._grammars = SlotGrammars(compiler)
        self._device = device
        self._masks = PinnedRing(device.type == "cuda")

    def enter(self, plan: StepPlan) -> None:
        """Requests enter their slots, whose last steps are collected."""
        self._grammars.enter(plan)

    def reset(self) -> None:
        """Forget every slot."""
        self._grammars.reset()

    def sift(self, plan: StepPlan, drafts: HostDrafts) -> SiftedDrafts:
        """The host's drafts without what grammars forbid, with what they force."""
        return self._grammars.sift(plan, drafts)

    def fill(self, masks: torch.Tensor, packed: Packed, rows: RowTokens) -> None:
        """Write the step's masks into ``masks`` int32[N, W] on the device; all else is allowed."""
        found = self._grammars.masks(packed.slots, packed.kinds.tobytes(), rows)
        count, size = found.bits.shape
        allow_all(masks)
        if not count:
            return
        host = self._masks.take(count * (1 + size))
        host[:count] = torch.from_numpy(found.nodes)
        host[count:] = torch.from_numpy(found.bits).flatten()
        block = host.to(self._device, non_blocking=True)
        masks.index_copy_(0, block[:count].long(), block[count:].view(count, size))

    def advance(self, packed: Packed, lens: I32, emitted: I32) -> None:
        """Move over what a collected step's rows emitted: int32[R], and their tokens joined."""
        accept_cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        self._grammars.advance(packed.slots, accept_cu, emitted)

    def refusal(self, slot: int) -> Refused | None:
        """Why the slot's request cannot go on, where its grammar is to blame."""
        return self._grammars.refusal(slot)
