"""Accept lengths that a draft would have, from where it agrees with the target."""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Projection(NamedTuple):
    """``per_step``: how often step i agrees where all before did (0 where none did).

    ``projected``: 1 + the mean number of leading agreements over all rows. ``walked``: emitted
    tokens a round over the target's own greedy text, from round to round as serving goes; None
    for text that is not the target's own.
    """

    per_step: tuple[float, ...]
    projected: float
    walked: float | None


class AgreementCounts:
    """Adds up batches of agreement."""

    def __init__(self, steps: int) -> None:
        self._reached = torch.zeros(steps + 1, dtype=torch.int64)
        self._rounds = 0
        self._emitted = 0

    def add(
        self,
        agree: torch.Tensor,
        own: torch.Tensor,
        origin: int,
        drafted: torch.Tensor | None = None,
    ) -> None:
        """``agree`` bool[B, R, S], ``origin``, ``drafted``: see StepResult, ``own``: see Batch;
        rows of own text count only, where there is any. What was not drafted everywhere is not
        walked.
        """
        leading = agree.cpu().int().cumprod(-1)
        steps = leading.shape[-1]
        known = torch.ones(leading.shape[:-1]) if drafted is None else drafted.cpu()
        whole = whole_drafts(own, origin, leading.shape[1], steps) & known.bool()
        self._reached[0] += int(whole.sum())
        self._reached[1:] += leading[whole].sum(0)
        if drafted is not None:
            return
        for row, marks in zip(leading, own.cpu(), strict=True):
            accepted = row.sum(-1).tolist()
            for begin, end in own_texts(marks):
                self._walk(accepted, max(0, begin + origin), end - 1 + origin)

    def result(self) -> Projection:
        """Of all that was added."""
        reached = self._reached.tolist()
        rates = tuple(after / before if before else 0.0 for before, after in pairwise(reached))
        projected = 1.0 + sum(reached[1:]) / max(1, reached[0])
        walked = self._emitted / self._rounds if self._rounds else None
        return Projection(rates, projected, walked)

    def _walk(self, accepted: list[int], at: int, last: int) -> None:
        """Rounds from row ``at`` until the text's end at row ``last``, as far as rows go."""
        while at < min(last, len(accepted)):
            emitted = min(accepted[at] + 1, last - at)
            self._rounds += 1
            self._emitted += emitted
            at += emitted


def whole_drafts(own: torch.Tensor, origin: int, rows: int, steps: int) -> torch.Tensor:
    """bool[B, R], on the CPU: drafts of ``steps`` that all begin behind own text; every draft of a
    row that has none.
    """
    made = torch.ones(len(own), rows, dtype=torch.bool)
    for row, marks in zip(made, own.cpu(), strict=True):
        texts = own_texts(marks)
        row.fill_(not texts)
        for begin, end in texts:
            row[max(0, begin + origin) : max(0, end + origin - steps + 1)] = True
    return made


def own_texts(marks: torch.Tensor) -> list[tuple[int, int]]:
    """Begins and ends of the runs of True in bool[T]."""
    edges = F.pad(marks.int(), (1, 1)).diff()
    begins, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
