"""Every invariant of the core's state as a named checker; each raises AssertionError."""

from .scheduler import Scheduler


def check_all(scheduler: Scheduler) -> None:
    """Run every checker."""
