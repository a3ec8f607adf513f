"""Accept lengths that a draft would have, from where it agrees with the target."""

from typing import NamedTuple

import torch


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

    def add(self, agree: torch.Tensor, own_from: torch.Tensor, origin: int) -> None:
        """``agree`` bool[B, R, S], ``origin``: see StepResult; rows of own text count only, where
        there is any.
        """
        leading = agree.cpu().int().cumprod(-1)
        first = own_from.cpu() + origin
        for row, begin in zip(leading, first.clamp(min=0).tolist(), strict=True):
            self._reached[0] += len(row) - begin
            self._reached[1:] += row[begin:].sum(0)
        own = own_from.cpu() > 0
        if own.any():
            self._walk(leading[own].sum(-1), first[own])

    def result(self) -> Projection:
        """Of all that was added."""
        reached = self._reached.tolist()
        rates = tuple(
            after / before if before else 0.0
            for before, after in zip(reached, reached[1:], strict=False)
        )
        projected = 1.0 + sum(reached[1:]) / max(1, reached[0])
        walked = self._emitted / self._rounds if self._rounds else None
        return Projection(rates, projected, walked)

    def _walk(self, accepted: torch.Tensor, first: torch.Tensor) -> None:
        for row, at in zip(accepted.tolist(), first.tolist(), strict=True):
            while at < len(row):
                self._rounds += 1
                self._emitted += row[at] + 1
                at += row[at] + 1
