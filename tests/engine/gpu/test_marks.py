"""Waiting for a device that may never come: it ends with a failure, or in time."""

import pytest

from outrider.engine.gpu.marks import Mark, wait_unless


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
