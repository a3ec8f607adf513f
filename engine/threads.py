"""How many OpenMP threads torch should use: measured, because more can be far slower."""

import time

import torch

from ..engine_core.available_cores import available_cores

# Two OpenMP threads on a busy two-core machine were seen 30 times slower than one, so a larger
# count must be clearly faster, and at its slow repeats rather than at its best one.
_REQUIRED_GAIN = 1.2
_REPEATS = 15


def choose_num_threads(requested: int | None = None, processes: int = 1) -> int:
    """Set torch's thread count to ``requested``, or to the fastest measured one; returns it.

    Measures one thread against 2, 4, ... and all available cores on a matmul of decode size
    (a few tens of milliseconds each); of several ``processes`` each gets its share of the cores.
    Raises ValueError if ``requested`` is not in 1..cores.
    """
    cores = available_cores()
    if requested is not None:
        if not 1 <= requested <= cores:
            raise ValueError(
                f"num_threads: must be between 1 and the {cores} available cores, is {requested}"
            )
        torch.set_num_threads(requested)
        return requested
    cores = max(1, cores // processes)
    counts = [1]
    while counts[-1] * 2 < cores:
        counts.append(counts[-1] * 2)
    if cores > 1:
        counts.append(cores)
    best = pick([(count, _slow_repeat(count)) for count in counts])
    torch.set_num_threads(best)
    return best


def pick(timings: list[tuple[int, float]]) -> int:
    """The count to use, from (threads, seconds) in ascending order of threads."""
    best, best_seconds = timings[0]
    for count, seconds in timings[1:]:
        if seconds * _REQUIRED_GAIN < best_seconds:
            best, best_seconds = count, seconds
    return best


def _slow_repeat(threads: int) -> float:
    """The third-slowest of the repeats, in seconds."""
    torch.set_num_threads(threads)
    left, right = torch.ones(16, 1024), torch.ones(1024, 3072)
    times = []
    for _ in range(_REPEATS + 3):
        begin = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - begin)
    return sorted(times[3:])[-3]
