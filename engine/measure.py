"""How long a verify step of a size takes, and drafting for it, measured on scratch KV."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .forward_batch import ForwardBatch
from .kv_pool import KVPool
from .models import Model
from .sampling.choose import argmax_rows

_CHAIN = 8  # query tokens of a row, when the batch has that many
_CONTEXT = 128  # tokens before a row's own
_BUDGET_S = 1.2  # for all sizes together
_TURNS = 5


class DraftWork(NamedTuple):
    """What a draft model does in a step, for the clock: it writes no request's KV.

    ``draft(rows)`` drafts in full for so many rows; ``align(batch)`` follows a target's step.
    """

    draft: Callable[[int], None]
    align: Callable[[ForwardBatch], None]


class StepTimer:
    """Times chains of several rows whose KV is the sink page, so that no request's KV changes.

    ``draft_work``: set by whoever makes a draft model's drafter.
    """

    def __init__(self, model: Model, kv: KVPool) -> None:
        self._model = model
        self._kv = kv
        self.draft_work: DraftWork | None = None

    def measure(
        self, batch_tokens: Sequence[int], announce: Callable[[int], None] | None = None
    ) -> list[float]:
        """Seconds of a step of each size (rising), drafting left out: the fastest of a few.

        ``announce`` is told each size before its run.
        """
        batches = {size: self._batch(size) for size in batch_tokens}
        return _measure(batch_tokens, lambda size: self._run(batches[size]), announce)

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Seconds of drafting for so many rows (rising): the fastest of a few.

        Raises RuntimeError without a draft model.
        """
        if self.draft_work is None:
            raise RuntimeError("there is no draft model whose drafting could be timed")
        return _measure(rows, self.draft_work.draft)

    def run(self, tokens: int) -> None:
        """The forward pass of a size, without logits."""
        self._model.forward(self._batch(tokens), self._kv)

    def _run(self, batch: ForwardBatch) -> None:
        argmax_rows(self._model.logits(self._model.forward(batch, self._kv)))
        if self.draft_work is not None:
            self.draft_work.align(batch)

    def _batch(self, tokens: int) -> ForwardBatch:
        widths = [_CHAIN] * (tokens // _CHAIN) + ([tokens % _CHAIN] if tokens % _CHAIN else [])
        device = self._kv.data.device
        node = torch.cat([torch.arange(width, device=device) for width in widths])
        lengths = torch.tensor(widths, dtype=torch.int32, device=device)
        pages = -(-(_CONTEXT + _CHAIN) // self._kv.page_size)
        return ForwardBatch(
            input_ids=torch.zeros_like(node),
            positions=_CONTEXT + node,
            kv_slots=torch.zeros_like(node),
            cu_q=torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).int(),
            kv_lens=_CONTEXT + lengths,
            page_table=torch.zeros(len(widths), pages, dtype=torch.int32, device=device),
            tree_bits=(2 << node) - 1,
            is_tree=torch.zeros(len(widths), dtype=torch.uint8, device=device),
            logits_index=torch.arange(tokens, device=device),
        )


def _measure(
    sizes: Sequence[int],
    run: Callable[[int], None],
    announce: Callable[[int], None] | None = None,
) -> list[float]:
    """Seconds of ``run`` at each size (rising).

    All sizes take turns, so that a disturbance does not hit every run of one of them. Sizes that
    double come first, then the ones between, while the budget lasts; the others are interpolated,
    or continue the average slope.
    """
    deadline = time.perf_counter() + _BUDGET_S
    best: dict[int, float] = {}
    for _ in range(_TURNS):
        for size in _coarse_first(sizes):
            if not best or time.perf_counter() + _expected(best, size) < deadline:
                if announce is not None:
                    announce(size)
                began = time.perf_counter()
                run(size)
                seconds = time.perf_counter() - began
                best[size] = min(seconds, best.get(size, seconds))
    return _complete(sizes, best)


def _coarse_first(sizes: Sequence[int]) -> list[int]:
    coarse = [sizes[0]]
    for size in sizes:
        if size >= 2 * coarse[-1]:
            coarse.append(size)
    return coarse + [size for size in sizes if size not in coarse]


def _expected(best: dict[int, float], size: int) -> float:
    """Seconds that a run will take: as before, or in proportion to the next smaller size."""
    known = max(n for n in best if n <= size)
    return best[known] * size / known


def _complete(sizes: Sequence[int], best: dict[int, float]) -> list[float]:
    known = sorted(best)
    # Noise only adds, and more tokens never take less time: a larger size's time is a bound.
    times = np.minimum.accumulate([best[size] for size in known][::-1])[::-1]
    slope = times[-1] / known[-1]
    if len(known) > 1:
        # Over all of them: the last two may differ by noise alone.
        slope = (times[-1] - times[0]) / (known[-1] - known[0])
    inside = np.interp(sizes, known, times)
    beyond = np.maximum(np.asarray(sizes) - known[-1], 0) * slope
    return [float(t) for t in inside + beyond]
