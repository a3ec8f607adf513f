"""Cores that this process may run on."""

import os


def available_cores() -> int:
    """At least one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
