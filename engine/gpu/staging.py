"""A step's input as one block of int32, so that one copy brings it to the device."""

import functools
from typing import NamedTuple

import numpy as np
import torch

from ...engine_core.ids import I64
from ...engine_core.plan import StepPlan


class StagingShape(NamedTuple):
    """Room for R rows, T query tokens, U page-table updates and E requests that enter a slot.

    ``window``: room for D pages of a draft's window that move; None without a window.
    """

    rows: int
    tokens: int
    updates: int
    entries: int
    window: int | None = None

    def holds(self, plan: StepPlan) -> bool:
        """Whether the plan's page-table changes and new requests have room; rows are not asked."""
        return (
            len(plan.page_slots) // 4 <= self.updates
            and len(plan.inits) <= self.entries
            and len(plan.window_pages) // 4 <= (self.window or 0)
        )


class StagingViews(NamedTuple):
    """The block's fields, int32 each, on the device.

    ``cu_q`` and ``node_cu`` [R + 1] are prefix sums of the rows' query tokens and of those whose
    logits count. ``caps`` [R]: drafts of a row that a drafter on the device fills in. ``tokens``
    and ``parents`` [T]: what the host knows of the query tokens (a verify row's first is on the
    device), ``node_index`` [T]: flat tokens of the nodes, the last one repeated. ``counts`` [2]:
    updates and entries in use. ``accept_caps`` [R], ``budget`` [1], ``window_pages``,
    ``window_drafts`` [D] and ``window_lows`` [R]: see StepPlan; ``window_count`` [1]: pages that
    move. The latter four are of length 0 without a window. Rows and
    entries that are not the step's name the spare slot; such rows have no tokens. They stand behind
    its rows or, in a step with prefill rows, before those.
    """

    slots: torch.Tensor
    kinds: torch.Tensor
    starts: torch.Tensor
    caps: torch.Tensor
    cu_q: torch.Tensor
    node_cu: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    node_index: torch.Tensor
    update_slots: torch.Tensor
    update_columns: torch.Tensor
    update_pages: torch.Tensor
    entry_slots: torch.Tensor
    entry_lens: torch.Tensor
    entry_outs: torch.Tensor
    counts: torch.Tensor
    accept_caps: torch.Tensor
    budget: torch.Tensor
    window_pages: torch.Tensor
    window_drafts: torch.Tensor
    window_lows: torch.Tensor
    window_count: torch.Tensor


def field_lengths(shape: StagingShape) -> tuple[int, ...]:
    """Elements of each field, in order."""
    rows, tokens, updates, entries, window = shape
    moves, lows, count = (0, 0, 0) if window is None else (window, rows, 1)
    return (
        rows, rows, rows, rows, rows + 1, rows + 1, tokens, tokens, tokens,
        updates, updates, updates, entries, entries, entries, 2,
        rows, 1, moves, moves, lows, count,
    )  # fmt: skip


def split_device(block: torch.Tensor, shape: StagingShape) -> StagingViews:
    """Views of int32[N] as the fields of ``shape``."""
    lengths = field_lengths(shape)
    return StagingViews(*torch.split(block[: sum(lengths)], list(lengths)))


@functools.lru_cache(maxsize=1024)
def field_edges(shape: StagingShape) -> I64:
    """int64[19]: where the fields begin that every step has, and the end of the last."""
    return np.cumsum((0, *field_lengths(shape)[:18]), dtype=np.int64)
