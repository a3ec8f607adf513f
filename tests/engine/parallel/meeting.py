"""Ranks as threads of this process that run one at a time and meet in collectives."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
_PATIENCE_S = 60.0


class Meeting:
    """Where ``size`` ranks exchange values; one of them runs at any time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.collectives = 0
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._values: list[object] = [None] * size

    def exchange(self, rank: int, value: T) -> list[T]:
        """What every rank brought, in order of rank."""
        self._values[rank] = value
        self._turn.release()
        try:
            self._barrier.wait(_PATIENCE_S)
            found = list(self._values)
            self._barrier.wait(_PATIENCE_S)
        finally:
            self._turn.acquire()
        self.collectives += rank == 0
        return found  # type: ignore[return-value]

    def run(self, work: Callable[["LocalRank"], T]) -> list[T]:
        """``work`` on every rank; its results by rank. Raises the first rank's own error."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def rank_main(rank: int) -> None:
            with self._turn:
                try:
                    results[rank] = work(LocalRank(rank, self))
                except BaseException as error:
                    if not isinstance(error, threading.BrokenBarrierError):
                        errors.append(error)
                    self._barrier.abort()

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert len(results) == self.size, "the ranks did not meet"
        return [results[rank] for rank in range(self.size)]


class LocalRank:
    """A rank of a :class:`Meeting`."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._meeting.exchange(self.rank, x.clone())
        x.copy_(first)
        for other in others:
            assert other.shape == x.shape
            x.add_(other)
        return x

    def agree(self, tensors: Sequence[torch.Tensor]) -> None:
        assert all(t.is_contiguous() and t.dtype == torch.int32 for t in tensors)
        all_tensors = self._meeting.exchange(self.rank, [t.clone() for t in tensors])
        for mine, decided in zip(tensors, all_tensors[0], strict=True):
            mine.copy_(decided)
