"""Stages of a device's memory, and torch's out-of-memory error as a refusal with numbers."""

from pathlib import Path

import pytest
import torch

from outrider.engine import build, rank_worker
from outrider.engine.device_memory import DeviceMemory
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.device_config import Placement
from outrider.engine_core.memory_plan import GIB, MemoryPlan, plan_memory
from outrider.engine_core.memory_report import memory_line
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.worker import WorkerFailed

QWEN = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-8b"
CUDA = torch.device("cuda")


def qwen_plan() -> MemoryPlan:
    config = EngineConfig(model="qwen", load_format="dummy")
    placement = Placement("cuda", "bfloat16", 0.9)
    plan = plan_memory(config, load_model_config(QWEN), {}, placement, 139 * GIB)
    assert isinstance(plan, MemoryPlan)
    return plan


class FakeDevice:
    """torch.cuda's figures, set by a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.reserved = self.allocated = self.peak = 0
        figures = {
            "mem_get_info": lambda: (140 * GIB - self.used, 140 * GIB),
            "memory_reserved": lambda: self.reserved,
            "memory_allocated": lambda: self.allocated,
            "max_memory_reserved": lambda: self.peak,
            "max_memory_allocated": lambda: self.allocated,
            "reset_peak_memory_stats": self._reset,
        }
        for name, figure in figures.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, figure=figure: figure())
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def _reset(self) -> None:
        self.peak = self.reserved

    def hold(self, outside: int, reserved: int, peak: int) -> None:
        self.used, self.reserved = (outside + reserved) * GIB, reserved * GIB
        self.allocated, self.peak = reserved * GIB, peak * GIB


def test_the_peak_is_what_torch_held_at_most_and_what_is_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(monkeypatch)
    memory = DeviceMemory(qwen_plan(), CUDA)
    assert memory.report() is None
    device.hold(outside=1, reserved=0, peak=0)
    memory.mark("context")
    device.hold(outside=1, reserved=20, peak=26)
    memory.mark("ready")
    # What is measured meanwhile does not count.
    device.peak = 60 * GIB
    memory.forget_peak()
    device.hold(outside=2, reserved=21, peak=23)
    memory.mark("serving")
    report = memory.report()
    assert report is not None
    assert [stage.stage for stage in report.stages] == ["context", "ready", "serving"]
    assert report.stages[2].other_bytes == 2 * GIB
    assert report.peak_device_bytes == 27 * GIB
    device.hold(outside=2, reserved=21, peak=28)
    memory.mark("serving")
    report = memory.report()
    assert report is not None
    assert (len(report.stages), report.peak_device_bytes) == (3, 30 * GIB)
    line = memory_line(report)
    assert "ready 21.000 GiB (torch 20.000 GiB, tensors 20.000 GiB)" in line
    assert "peak 30.000 GiB, planned 27.6" in line


def test_a_cpu_has_nothing_to_mark() -> None:
    memory = DeviceMemory(qwen_plan(), torch.device("cpu"))
    memory.mark("context")
    memory.release_cache()
    memory.forget_peak()
    assert memory.report() is None


def test_running_out_of_memory_is_a_refusal_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch).hold(outside=1, reserved=138, peak=138)
    memory = DeviceMemory(qwen_plan(), CUDA)
    with pytest.raises(RefusedError) as caught, memory.guard("the KV pool"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")
    refused = caught.value.refused
    assert refused.field == "mem_fraction_static"
    for words in (
        "at the KV pool, with 1.000 GiB free",
        "weights 15.256 GiB, KV pool 11.252 GiB",
        "Tried to allocate 9 GiB.)",
    ):
        assert words in refused.reason
    with pytest.raises(RuntimeError, match="else"), memory.guard("loading"):
        raise RuntimeError("else")
    lost = "rank 1 ended early: CUDA out of memory"
    with pytest.raises(WorkerFailed, match=lost), memory.guard("the capture"):
        raise WorkerFailed(lost)


@pytest.mark.parametrize("first", [torch.OutOfMemoryError("9 GiB"), RuntimeError("ALLOC_FAILED")])
def test_what_lacked_is_found_behind_a_capture_that_was_cut_short(
    monkeypatch: pytest.MonkeyPatch, first: RuntimeError
) -> None:
    FakeDevice(monkeypatch).hold(outside=1, reserved=138, peak=138)
    memory = DeviceMemory(qwen_plan(), CUDA)

    def capture() -> None:
        try:
            raise first
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RefusedError, match=str(first)), memory.guard("the capture"):
        capture()


def test_an_engine_on_a_small_device_refuses_before_it_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 GiB for an 8B model: nothing is loaded, and no CUDA device is touched but asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 * GIB, 16 * GIB))
    monkeypatch.setattr(rank_worker, "load_model", lambda *args: pytest.fail("a model was loaded"))
    config = EngineConfig(model=str(QWEN), load_format="dummy", device="cuda", num_threads=1)
    with pytest.raises(RefusedError) as caught:
        build.build_worker(config)
    assert caught.value.refused.field == "mem_fraction_static"
    assert "no room for KV beside 15.256 GiB of weights" in caught.value.refused.reason
