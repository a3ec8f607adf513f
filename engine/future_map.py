"""What only the device knows between steps: per request slot, lengths, last token and pages."""

from typing import NamedTuple

import torch

from ..engine_core.ids import I32, i32
from ..engine_core.plan import SlotInit, StepPlan
from .sampling.prompt_scores import WantedScores
from .sampling.slot_edits import SlotEdits
from .sampling.slot_table import SlotTable
from .window_pages import WindowPages


class HostViews(NamedTuple):
    """Arrays that share memory with the tensors of the same names."""

    seq_lens: I32
    last_tokens: I32
    out_counts: I32
    page_table: I32


class FutureMap:
    """State of S request slots, written by the steps in order and never read back by the core.

    ``seq_lens``: tokens whose KV is in place. ``last_tokens``: the bonus token of the slot's
    latest step, whose KV is not written yet. ``out_counts``: output tokens so far, the bonus
    token included. All int32[S]. ``page_table``: int32[S, P], 0 where no page is mapped;
    ``slot_pages``: its rows, int32[1, P] each.
    ``window``: of a draft with a window's pool, its pages.
    ``sampling`` and ``edits``: the slots' sampling parameters and penalty counts; ``scores``: the
    prompts to be scored. ``host``: the same memory for compiled code (on a CPU, the only device so
    far).
    """

    def __init__(
        self, max_slots: int, max_pages: int, vocab_size: int, device: torch.device
    ) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.max_slots = max_slots
        self.seq_lens = zeros(max_slots)
        self.last_tokens = zeros(max_slots)
        self.out_counts = zeros(max_slots)
        self.page_table = zeros(max_slots, max_pages)
        self.slot_pages = self.page_table[:, None].unbind()
        self.edits = SlotEdits(max_slots, vocab_size, device)
        self.sampling = SlotTable(max_slots, device, self.edits)
        self.scores = WantedScores()
        self.window: WindowPages | None = None
        self.host = HostViews(
            self.seq_lens.numpy(),
            self.last_tokens.numpy(),
            self.out_counts.numpy(),
            self.page_table.numpy(),
        )

    def apply(self, plan: StepPlan) -> None:
        """Enter new requests, then write the plan's page-table changes."""
        for init in plan.inits:
            self._enter(init)
        if plan.page_slots:
            slots, columns = i32(plan.page_slots), i32(plan.page_indexes)
            self.host.page_table[slots, columns] = i32(plan.page_ids)
        if self.window is not None:
            self.window.apply(plan)

    def reset(self) -> None:
        """Forget every slot."""
        for state in (self.seq_lens, self.last_tokens, self.out_counts, self.page_table):
            state.zero_()
        if self.window is not None:
            self.window.reset()
        self.sampling.reset()
        self.scores.reset()

    def _enter(self, init: SlotInit) -> None:
        slot = init.slot
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot} is outside 0..{self.max_slots - 1}")
        self.seq_lens[slot] = init.cached_len
        self.last_tokens[slot] = 0
        self.out_counts[slot] = len(init.output) // 4
        self.page_table[slot] = 0
        self.sampling.enter(init)
        self.scores.enter(init)
