"""A synthetic speculative decode: chains with known acceptance, a known T(batch tokens)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from outrider.engine_core.controller import LengthController
from outrider.engine_core.ids import I32
from outrider.engine_core.plan import StepResult
from outrider.engine_core.step_times import StepTimes, knot_sizes

WIDTH = 11
LATE = 250e-6
Accept = Callable[[int, int], float]  # (row, step) -> acceptance of one draft
Match = Callable[[int, int], int]
Times = Callable[[int], float]


class Outcome(NamedTuple):
    """Tokens a second, and per step: was it late-bound, drafts and tokens of all rows."""

    rate: float
    late: list[bool]
    drafts: list[int]
    reasons: list[list[int]]


def constant(p: float) -> Accept:
    return lambda row, step: p


class DraftProcess:
    def __init__(
        self, rows: int, times: Times, accept: Accept, match: Match = lambda row, step: 8
    ) -> None:
        self.rows, self.times, self.accept, self.match = rows, times, accept, match
        self._random = np.random.default_rng(3)
        self.slots = np.arange(rows, dtype=np.int32)
        self.room = np.full(rows, WIDTH, dtype=np.int32)

    def expected_fixed(self, steps: int) -> float:
        """Tokens a second of the best fixed length, in expectation."""
        return max(self._fixed(k, steps) for k in range(WIDTH + 1))

    def _fixed(self, k: int, steps: int) -> float:
        tokens = sum(
            1.0 + sum(self.accept(r, i) ** j for j in range(1, k + 1))
            for i in range(steps)
            for r in range(self.rows)
        )
        return tokens / (steps * (self.times(self.rows * (1 + k)) + (LATE if k else 0.0)))

    def controller(self) -> LengthController:
        sizes = knot_sizes(self.rows * (WIDTH + 1))
        times = StepTimes(sizes, [self.times(n) for n in sizes])
        controller = LengthController(times, self.rows, WIDTH)
        for slot in range(self.rows):
            controller.start(slot)
        return controller

    def run(self, controller: LengthController, steps: int) -> Outcome:
        """Steps with overlap: each is planned before the result of the one before it."""
        tokens, seconds = 0, 0.0
        out = Outcome(0.0, [], [], [])
        lengths = controller.plan(self.slots, self.room, self.rows)
        for step in range(steps):
            following = controller.plan(self.slots, self.room, self.rows)
            self._offer(controller, step)
            counts = np.zeros(self.rows, dtype=np.int32)
            reasons = lengths.reasons
            if lengths.late_bound:
                bound = controller.bind(self.slots, lengths.caps, self.rows, self.rows)
                counts, reasons = bound.counts, bound.reasons
            lens, emitted = self._verify(step, counts)
            size = self.rows + int(counts.sum())
            busy = self.times(size)
            waited = LATE if lengths.late_bound else 0.0
            tokens += int(lens.sum())
            seconds += busy + waited
            controller.learn(self.slots, lens, emitted)
            controller.observe(
                StepResult(
                    step, b"", b"", b"", b"",
                    busy_ns=int(busy * 1e9), batch_tokens=size, wait_ns=int(waited * 1e9),
                ),
                True,
            )  # fmt: skip
            out.late.append(lengths.late_bound)
            out.drafts.append(int(counts.sum()))
            out.reasons.append(reasons.tolist())
            lengths = following
        return out._replace(rate=tokens / seconds)

    def _offer(self, controller: LengthController, step: int) -> None:
        matches = [self.match(r, step) for r in range(self.rows)]
        controller.offer(
            self.slots,
            np.full(self.rows, WIDTH, dtype=np.int32),
            np.array(matches, dtype=np.int32),
            np.tile(np.arange(1, WIDTH + 1, dtype=np.int32), (self.rows, 1)),
            np.tile(np.arange(WIDTH, dtype=np.int32), (self.rows, 1)),
            np.ones((self.rows, WIDTH), dtype=np.float32),
        )

    def _verify(self, step: int, counts: I32) -> tuple[I32, I32]:
        lens: list[int] = []
        emitted: list[int] = []
        for row in range(self.rows):
            correct, p = 0, self.accept(row, step)
            while correct < WIDTH and self._random.random() < p:
                correct += 1
            kept = min(correct, int(counts[row]))
            lens.append(kept + 1)
            emitted += range(1, kept + 1)
            emitted.append(kept + 1 if correct > kept else 999)
        return np.array(lens, dtype=np.int32), np.array(emitted, dtype=np.int32)
