"""Marks what a CUDA device's memory holds after each stage, and says what ran out of it."""

import contextlib
from collections.abc import Iterator

import torch

from ..engine_core.memory_plan import MemoryPlan, gib, memory_parts
from ..engine_core.memory_report import MemoryReport, MemoryStage, make_report
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.worker import WorkerFailed


class DeviceMemory:
    """The stages of one engine. On a CPU there is nothing to mark and no report."""

    def __init__(self, plan: MemoryPlan, device: torch.device) -> None:
        self.plan = plan
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._stages: list[MemoryStage] = []

    def mark(self, stage: str) -> None:
        """Record what is in use now, and the most that torch held since the last ``forget_peak``.

        A stage marked again is replaced.
        """
        if not self._on_cuda:
            return
        free, total = torch.cuda.mem_get_info(self._device)
        self._stages = [marked for marked in self._stages if marked.stage != stage]
        self._stages.append(
            MemoryStage(
                stage=stage,
                device_bytes=total - free,
                reserved_bytes=torch.cuda.memory_reserved(self._device),
                allocated_bytes=torch.cuda.memory_allocated(self._device),
                peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device),
                peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            )
        )

    def release_cache(self) -> None:
        """Give the device what torch's allocator keeps unused: copies made while loading."""
        if self._on_cuda:
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Count peaks from here: what was allocated meanwhile was not the engine's."""
        if self._on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def report(self) -> MemoryReport | None:
        """The stages so far beside the plan; None on a CPU."""
        return make_report(self.plan, tuple(self._stages)) if self._stages else None

    @contextlib.contextmanager
    def guard(self, stage: str) -> Iterator[None]:
        """Turn a device's out-of-memory error into a refusal with the plan's numbers."""
        try:
            yield
        except WorkerFailed:
            raise  # another rank's device is not this one
        except RuntimeError as error:
            cause = _out_of_memory(error)
            if not self._on_cuda or cause is None:
                raise
            free = torch.cuda.mem_get_info(self._device)[0]
            raise RefusedError(_ran_out(self.plan, stage, free, cause)) from error


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error itself or what it came from, if memory was what lacked.

    An interrupted capture fails once more at its end, and libraries have errors of their own.
    """
    while error is not None:
        lacks = isinstance(error, torch.OutOfMemoryError)
        if lacks or "out of memory" in str(error) or "ALLOC_FAILED" in str(error):
            return error
        error = error.__cause__ or error.__context__
    return None


def _ran_out(plan: MemoryPlan, stage: str, free: int, error: BaseException) -> Refused:
    listed = ", ".join(f"{name} {gib(size)}" for name, size in memory_parts(plan) if size)
    said = str(error).partition("\n")[0]
    return Refused(
        "mem_fraction_static",
        f"{plan.mem_fraction}: the device ran out of memory at {stage}, with {gib(free)} free; "
        f"planned were {gib(plan.total_bytes)} of {gib(plan.free_bytes)}: {listed}; other "
        "processes may have taken memory meanwhile; lower it or --max-total-tokens "
        f"({said})",
    )
