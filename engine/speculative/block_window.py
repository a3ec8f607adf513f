"""Blocks that see their slots' last window alone, in a draft's own pages (block_drafts.md 3)."""

from dataclasses import replace

import torch

from ..forward_batch import ForwardBatch
from ..window_pages import WindowPages
from .device_drafter import DraftRows
from .draft_ops import DraftOps


class BlockWindow:
    """The part of a block drafter that knows of its pool: what to read there, where to write.

    Slots have ``page_table`` int32[S, P] of the target's pages, of ``page_size`` tokens.
    """

    def __init__(
        self, pages: WindowPages, page_table: torch.Tensor, page_size: int, ops: DraftOps
    ) -> None:
        self._pages = pages
        self._page_table = page_table
        self._page_size = page_size
        self._ops = ops

    def begin(self, rows: DraftRows) -> tuple[DraftRows, torch.Tensor]:
        """The rows, those without any draft KV no longer to be drafted for; and where what they
        see begins, int32[R]."""
        starts, caps = torch.empty_like(rows.slots), torch.empty_like(rows.caps)
        self._ops.window_starts(
            rows.slots, rows.caps, rows.seq_lens, self._pages.lows, self._pages.window,
            self._page_size, starts=starts, block_caps=caps,
        )  # fmt: skip
        return rows._replace(caps=caps), starts

    def view(self, batch: ForwardBatch, rows: DraftRows, starts: torch.Tensor) -> ForwardBatch:
        """Blocks over whole sequences (their page table is not read) as blocks over their views.

        ``batch.kv_slots`` and ``kv_lens`` are changed.
        """
        places = torch.empty_like(batch.positions)
        shape = (len(rows.slots), self._pages.view)
        pages = torch.empty(shape, dtype=torch.int32, device=places.device)
        self._ops.window_layout(
            rows.slots, starts, batch.cu_q, batch.positions, self._page_table, self._pages.table,
            self._page_size,
            kv_slots=batch.kv_slots, kv_lens=batch.kv_lens, places=places, pages=pages,
        )  # fmt: skip
        if not places.is_cuda:
            # As many pages as the longest row needs, as on a CPU without a window.
            pages = pages[:, : max(1, -(-int(batch.kv_lens.max()) // self._page_size))]
        return replace(
            batch,
            positions=places,
            rope_positions=batch.positions,
            page_table=pages,
            slots=None,
        )

    def slots_of(self, kv_slots: torch.Tensor) -> torch.Tensor:
        """int64[T]: the draft's KV slots of the target's, in the sink where it has none."""
        out = torch.empty_like(kv_slots)
        self._ops.draft_slots(kv_slots, self._pages.table, self._page_size, out=out)
        return out
