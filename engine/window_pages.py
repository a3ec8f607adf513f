"""Where a draft that keeps a window of KV has it: by page of the target's pool, and by slot."""

import torch

from ..engine_core.draft_window import WindowPool, view_pages
from ..engine_core.ids import i32
from ..engine_core.plan import StepPlan


class WindowPages:
    """State of a device, changed by the steps in order.

    ``table`` int32[N + 1]: the draft's page of each of the target's N pages, 0 for none. ``lows``
    int32[S]: by slot, the first position that has draft KV. ``window``: tokens that a draft sees
    at least; ``view``: pages that hold them and the block behind them.
    """

    def __init__(
        self,
        pool: WindowPool,
        width: int,
        target_pages: int,
        page_size: int,
        slots: int,
        device: torch.device,
    ) -> None:
        """``width``: tokens of a block, at most."""
        self.window = pool.window
        self.view = view_pages(pool.window, page_size, width)
        self.table = torch.zeros(target_pages + 1, dtype=torch.int32, device=device)
        self.lows = torch.zeros(slots, dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Write what a plan changes; on a CPU, whose steps begin so."""
        table, lows = self.table.numpy(), self.lows.numpy()
        table[i32(plan.window_pages)] = i32(plan.window_drafts)
        lows[i32(plan.slots)] = i32(plan.window_lows)

    def reset(self) -> None:
        """Forget every slot and page."""
        self.table.zero_()
        self.lows.zero_()
