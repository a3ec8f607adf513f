"""T(batch tokens): seconds that a step of so many query tokens takes, measured and kept current.

A second such table has the seconds that drafting takes by rows, where a draft model drafts.

The table starts from :meth:`Worker.measure` and is refreshed from the steps' own ``busy_ns``. A
knot with fresh samples is scaled by their running median of (seen / measured), the others by what
lies between their fresh neighbours: a change that touches every step (longer contexts, a busier
machine) moves sizes that were not run lately too.
"""

from collections import deque
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from .worker import Worker

F64 = npt.NDArray[np.float64]

SAMPLES = 15  # of a running median; a third of them must be wrong to move it far
MIN_SAMPLES = 5
FRESH_STEPS = 400  # samples of a size not seen for so many steps are not trusted
REBUILD_EVERY = 8  # steps between two refreshes of the dense table


def knot_sizes(limit: int) -> list[int]:
    """Batch sizes to measure, 1..limit: every small one that matters, then by thirds."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16]
    while sizes[-1] < limit:
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1] % 3 else sizes[-1] * 4 // 3)
    return sorted({min(size, limit) for size in sizes})


def measure_times(worker: Worker, limit: int) -> "StepTimes":
    """Measure an idle worker for steps of 1..limit query tokens."""
    sizes = knot_sizes(limit)
    return StepTimes(sizes, worker.measure(sizes))


def measure_drafting(worker: Worker, limit: int) -> "StepTimes":
    """Measure what drafting for 1..limit rows adds to an idle worker's step."""
    sizes = knot_sizes(limit)
    return StepTimes(sizes, worker.measure_drafting(sizes))


@final
class StepTimes:
    """A monotone table of step times in seconds, linear between its knots.

    ``table``: float64[largest knot + 1], seconds by batch tokens (or rows); entry 0 is for none.
    Raises ValueError if sizes do not rise from 1 or a time is not positive and finite.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self._sizes = np.array(sizes, dtype=np.float64)
        self._log_sizes = np.log2(np.maximum(self._sizes, 1.0))
        self._measured = np.maximum.accumulate(np.array(seconds, dtype=np.float64))
        if len(sizes) != len(seconds) or not len(sizes):
            raise ValueError(f"{len(seconds)} times for {len(sizes)} sizes")
        if sizes[0] < 1 or bool(np.any(np.diff(self._sizes) <= 0)):
            raise ValueError(f"batch sizes must rise from 1, got {list(sizes)}")
        if not bool(np.all(np.isfinite(self._measured))) or min(seconds) <= 0.0:
            raise ValueError(f"times must be positive seconds, got {list(seconds)}")
        self._samples = [deque[float](maxlen=SAMPLES) for _ in sizes]
        self._last_seen = [0] * len(sizes)
        self._steps = 0
        self._grid = np.arange(int(sizes[-1]) + 1, dtype=np.float64)
        self._base = np.interp(self._grid, self._sizes, self._measured)
        # By batch tokens: the nearest knot.
        self._nearest = np.abs(self._grid[:, None] - self._sizes).argmin(axis=1).tolist()
        self.table: F64 = self._base.copy()

    @property
    def knots(self) -> tuple[tuple[int, float], ...]:
        """The measured (size, seconds), for a trace's header."""
        return tuple((int(n), float(t)) for n, t in zip(self._sizes, self._measured, strict=True))

    def seconds(self, batch_tokens: int) -> float:
        """T(batch tokens); past the largest knot the last slope goes on."""
        return _at(self.table, batch_tokens)

    def measured(self, batch_tokens: int) -> float:
        """T(batch tokens) as it was measured, whatever was observed since."""
        return _at(self._base, batch_tokens)

    def observe(self, batch_tokens: int, busy_ns: int) -> None:
        """Learn from one step; steps without tokens or time, or past the table, teach nothing."""
        if busy_ns > 0 and 1 <= batch_tokens < len(self._base):
            self.note(batch_tokens, busy_ns * 1e-9 / float(self._base[batch_tokens]))

    def note(self, batch_tokens: int, ratio: float) -> None:
        """Learn that a step took ``ratio`` times what was measured; not of one past the table."""
        if not 1 <= batch_tokens < len(self._base):
            return
        self._steps += 1
        knot = self._nearest[batch_tokens]
        self._samples[knot].append(ratio)
        self._last_seen[knot] = self._steps
        if self._steps % REBUILD_EVERY == 0:
            self._rebuild()

    def _rebuild(self) -> None:
        fresh = [
            knot
            for knot, samples in enumerate(self._samples)
            if len(samples) >= MIN_SAMPLES and self._steps - self._last_seen[knot] <= FRESH_STEPS
        ]
        if not fresh:
            return
        scales = np.interp(
            self._log_sizes,
            self._log_sizes[fresh],
            [_median(self._samples[knot]) for knot in fresh],
        )
        times = np.maximum.accumulate(self._measured * scales)
        self.table = np.interp(self._grid, self._sizes, times)


def _at(table: F64, size: int) -> float:
    last = len(table) - 1
    if size <= last:
        return float(table[size])
    return float(table[last]) + float(table[last] - table[last - 1]) * (size - last)


def _median(samples: deque[float]) -> float:
    ordered = sorted(samples)
    return ordered[len(ordered) // 2]
