"""A device that may never come is waited for until it fails, or in time; rings go round."""

import pytest
import torch

from outrider.engine.gpu.marks import Mark, MarkRing, wait_unless
from outrider.engine.gpu.pinned_ring import RING, PinnedRing


class FakeMark:
    """Passed once it was asked ``asks`` times."""

    def __init__(self, asks: int) -> None:
        self.left = asks

    def record(self) -> None: ...

    def synchronize(self) -> None:
        raise AssertionError("nothing may wait without end here")

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def elapsed_time(self, end: Mark) -> float:
        return 0.0


def test_a_mark_that_is_passed_is_enough() -> None:
    wait_unless(FakeMark(0), lambda: "a failure that came too late", 1.0)
    mark = FakeMark(5)
    wait_unless(mark, lambda: None, 1.0)
    assert mark.left == -1


def test_a_failure_ends_the_wait() -> None:
    reasons = iter([None, None, "rank 1 is gone"])
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        wait_unless(FakeMark(10**9), lambda: next(reasons), 60.0)


def test_time_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match=r"did not end within 0\.02 s"):
        wait_unless(FakeMark(10**9), lambda: None, 0.02)


def test_marks_come_around_in_turn() -> None:
    ring = MarkRing(torch.device("cpu"), 3)
    first = [ring.take() for _ in range(3)]
    assert len({id(mark) for mark in first}) == 3
    assert [ring.take() for _ in range(3)] == first


def test_blocks_come_around_in_turn_in_the_size_that_is_asked_for() -> None:
    ring = PinnedRing(False)
    for size in (5, 2000, 3, 0, 3):
        taken = [ring.take(size) for _ in range(RING)]
        for number, block in enumerate(taken):
            block.array[:] = number
        assert [block.tensor.tolist() for block in taken] == [[n] * size for n in range(RING)]
