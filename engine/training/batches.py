"""Batches of rows: which rows a step takes follows from its number, so that a run can go on."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .token_files import DataError, Tokens

Rows = NDArray[np.int32]
Marks = NDArray[np.bool_]


class Batch(NamedTuple):
    """``ids`` int64[B, T]; ``own`` bool[B, T]: which of them the target chose itself."""

    ids: torch.Tensor
    own: torch.Tensor


class RowSource:
    """Rows in an order of their own for every epoch. ``own``: see Batch; None for no token."""

    def __init__(self, rows: Rows, own: Marks | None, seed: int, device: torch.device) -> None:
        if not len(rows):
            raise DataError("data: too short for a single row of sequence_length tokens")
        self._rows = torch.from_numpy(rows).to(device)
        self._own = None if own is None else torch.from_numpy(own).to(device)
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._rows.shape[0]

    def take(self, first: int, count: int) -> Batch:
        """Rows ``first`` to ``first + count`` of the endless sequence of epochs."""
        picked: list[torch.Tensor] = []
        while count:
            epoch, at = divmod(first, len(self))
            part = self._epoch_order(epoch)[at : at + count]
            picked.append(part)
            first, count = first + len(part), count - len(part)
        rows = torch.cat(picked)
        ids = self._rows[rows].long()
        own = torch.zeros_like(ids, dtype=torch.bool) if self._own is None else self._own[rows]
        return Batch(ids, own)

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if epoch != self._epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self))
            self._order = torch.from_numpy(order).to(self._rows.device)
            self._epoch = epoch
        return self._order


class Mixture:
    """Batches of several sources, each with a fixed number of rows of every batch."""

    def __init__(self, sources: list[tuple[RowSource, int]]) -> None:
        self._sources = [(source, rows) for source, rows in sources if rows]

    @property
    def batch_rows(self) -> int:
        """Rows of a batch on one rank."""
        return sum(rows for _, rows in self._sources)

    def take(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Step ``step``'s batch of this rank."""
        parts = [source.take((step * world + rank) * rows, rows) for source, rows in self._sources]
        return Batch(
            torch.cat([part.ids for part in parts]), torch.cat([part.own for part in parts])
        )


def windows(stream: Tokens, length: int) -> Rows:
    """int32[n, length]: the stream in pieces; what is left over at its end is dropped."""
    count = len(stream) // length
    return stream[: count * length].reshape(count, length)


def hold_out_windows(rows: Rows, every: int = 50) -> tuple[Rows, Rows]:
    """Rows to learn from, and every 50th for the selection of data without documents."""
    held = np.arange(len(rows)) % every == every - 1
    if not held.any() and len(rows) > 1:
        held[-1] = True
    return rows[~held], rows[held]


def prompt_rows(stream: Tokens, length: int, count: int, seed: int) -> Rows:
    """int32[count, length]: prompts that begin anywhere in the stream. Raises DataError."""
    if len(stream) < length:
        raise DataError(f"data: {len(stream)} tokens are too few for prompts of {length}")
    starts = np.random.default_rng(seed).integers(0, len(stream) - length + 1, size=count)
    taken: Rows = stream[starts[:, None] + np.arange(length)[None, :]]
    return taken
