"""What an engine measured of its device's memory, beside what was planned."""

import msgspec

from .memory_plan import MemoryPlan, gib


class MemoryStage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes after a stage of an engine's life.

    ``device_bytes``: in use on the whole device, other processes' included. ``reserved_bytes``:
    of those, what torch's allocator holds, ``allocated_bytes``: of those, what tensors take;
    ``peak_reserved_bytes``, ``peak_allocated_bytes``: the most of each so far.
    """

    stage: str
    device_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int

    @property
    def other_bytes(self) -> int:
        """Outside torch's allocator: contexts, kernels' code, graphs' records."""
        return self.device_bytes - self.reserved_bytes


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Stages in order: context, weights, perhaps draft weights, pool, state, ready (graphs
    captured), perhaps serving.

    ``peak_device_bytes``: the most that the device held, as far as the stages can tell: what
    was outside torch's allocator at the end of a stage, and the most inside it so far.
    """

    plan: MemoryPlan
    stages: tuple[MemoryStage, ...]
    peak_device_bytes: int


def make_report(plan: MemoryPlan, stages: tuple[MemoryStage, ...]) -> MemoryReport:
    """The report of at least one stage."""
    peak = max(stage.other_bytes + stage.peak_reserved_bytes for stage in stages)
    return MemoryReport(plan=plan, stages=stages, peak_device_bytes=peak)


def memory_line(report: MemoryReport) -> str:
    """The stages and the plan as a line of text."""
    stages = "; ".join(
        f"{stage.stage} {gib(stage.device_bytes)} (torch {gib(stage.reserved_bytes)}, "
        f"tensors {gib(stage.allocated_bytes)})"
        for stage in report.stages
    )
    return (
        f"device memory in use after each stage: {stages}; "
        f"peak {gib(report.peak_device_bytes)}, planned {gib(report.plan.total_bytes)}"
    )
