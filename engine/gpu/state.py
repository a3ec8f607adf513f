"""What only the GPU knows between steps: per request slot, lengths, last token and pages."""

import torch

from ...engine_core.plan import SlotInit
from ...kernels.page_updates_gpu import apply_page_updates
from ...kernels.window_layout_gpu import apply_window
from ..sampling.prompt_scores import WantedScores
from ..sampling.slot_table import SlotTable
from ..window_pages import WindowPages
from .device_edits import DeviceEdits
from .staging import StagingViews


class DeviceState:
    """State of S request slots and a spare one that padding may write to.

    ``seq_lens``, ``last_tokens``, ``out_counts`` int32[S + 1] and ``page_table`` int32[S + 1, P]
    mean what they do in :class:`~outrider.engine.future_map.FutureMap`, this device's
    counterpart of which it is, and so do ``window`` and ``scores``. Steps change it in stream
    order; the host never reads it.
    """

    def __init__(
        self,
        max_slots: int,
        max_pages: int,
        vocab_size: int,
        device: torch.device,
        decides: bool = True,
    ) -> None:
        """``decides``: whether this rank edits logits."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.max_slots = max_slots
        self.spare_slot = max_slots
        self.seq_lens = zeros(max_slots + 1)
        self.last_tokens = zeros(max_slots + 1)
        self.out_counts = zeros(max_slots + 1)
        self.page_table = zeros(max_slots + 1, max_pages)
        self.window: WindowPages | None = None
        self.edits = DeviceEdits(max_slots + 1, vocab_size, device, decides)
        self.sampling = SlotTable(max_slots + 1, device, self.edits)
        self.scores = WantedScores()

    def enter(self, init: SlotInit) -> None:
        """Take a new request's sampling parameters; its lengths come with the staging block.

        Raises ValueError for a slot that does not exist.
        """
        if not 0 <= init.slot < self.max_slots:
            raise ValueError(f"slot {init.slot} is outside 0..{self.max_slots - 1}")
        self.sampling.enter(init)
        self.scores.enter(init)

    def apply(self, staging: StagingViews) -> None:
        """Write the step's entries and page-table changes."""
        if len(staging.entry_slots):
            slots = staging.entry_slots.long()
            self.seq_lens.index_copy_(0, slots, staging.entry_lens)
            self.last_tokens.index_fill_(0, slots, 0)
            self.out_counts.index_copy_(0, slots, staging.entry_outs)
            self.page_table.index_fill_(0, slots, 0)
        if len(staging.update_slots):
            apply_page_updates(
                self.page_table,
                staging.update_slots,
                staging.update_columns,
                staging.update_pages,
                staging.counts[:1],
            )
        if self.window is not None and len(staging.window_lows):
            apply_window(
                self.window.table,
                self.window.lows,
                staging.window_pages,
                staging.window_drafts,
                staging.window_count,
                staging.slots,
                staging.window_lows,
            )

    def reset(self) -> None:
        """Forget every slot."""
        for state in (self.seq_lens, self.last_tokens, self.out_counts, self.page_table):
            state.zero_()
        if self.window is not None:
            self.window.reset()
        self.sampling.reset()
        self.scores.reset()
