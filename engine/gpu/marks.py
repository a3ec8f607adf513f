"""Points in a device's work that the host can wait for and measure between."""

import itertools
import time
from collections.abc import Callable
from typing import Protocol, cast

import torch


class Mark(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """Put the mark behind what was enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""
        ...

    def query(self) -> bool:
        """Whether the device has passed the mark."""
        ...

    def elapsed_time(self, end: "Mark") -> float:
        """Milliseconds from this mark to ``end``."""
        ...


class _HostMark:
    """The mark of a device that is never behind: kernels in Triton's interpreter."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Mark) -> float:
        assert isinstance(end, _HostMark)
        return (end._at - self._at) * 1e3


def new_mark(device: torch.device) -> Mark:
    """A mark that was not recorded yet."""
    mark: Mark = _HostMark()
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark = cast(Mark, event)  # torch names its parameters otherwise
    return mark


class MarkRing:
    """Marks taken in turn, each free again once its step and the next are over.

    To make an event takes longer than to record it.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._marks = itertools.cycle([new_mark(device) for _ in range(size)])

    def take(self) -> Mark:
        """One that was not recorded for the step that asks."""
        return next(self._marks)


def wait_unless(mark: Mark, failure: Callable[[], str | None], timeout_s: float) -> None:
    """Wait for ``mark``; raises RuntimeError once there is a ``failure``, or after ``timeout_s``.

    A collective that waits for a dead rank never ends, so the device is asked again and again,
    which is what waiting for an event does anyway.
    """
    deadline = time.monotonic() + timeout_s
    while not mark.query():
        reason = failure()
        if reason is not None:
            raise RuntimeError(reason)
        if time.monotonic() > deadline:
            raise RuntimeError(f"a step did not end within {timeout_s:g} s")
