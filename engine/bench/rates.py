"""The two rates of a step's floor, measured: copied bytes a second and matmul operations."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from ...engine_core.step_floor import Rates

# A GPU's caches must not hold the buffers; a CPU's rates show in less, and sooner.
_COPY_BYTES = {"cuda": 4_000_000_000, "cpu": 128_000_000}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 768}
_TURNS = 15


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Copy bandwidth (bytes read plus written) and matmul rate of ``dtype`` on random numbers."""
    rates = Rates(copy_rate(device), _matmul_rate(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def median_seconds(device: torch.device, call: Callable[[], object], turns: int = _TURNS) -> float:
    """Median seconds of ``call``, which enqueues work on ``device``; two runs come before."""
    call()
    call()
    if device.type != "cuda":
        return statistics.median(_host_seconds(call) for _ in range(turns))
    marks = [_event() for _ in range(turns + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    times = [float(begin.elapsed_time(end)) for begin, end in pairwise(marks)]
    return statistics.median(times) * 1e-3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def copy_rate(device: torch.device) -> float:
    """Bytes read and written a second of a copy that no cache holds."""
    size = _COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / median_seconds(device, lambda: target.copy_(source))


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = _MATMUL_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / median_seconds(device, lambda: torch.mm(left, right, out=out))
