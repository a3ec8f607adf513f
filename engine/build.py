"""From a user's configuration to a worker and to an engine core that drives it."""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from ..engine_core.assembly import Assembly, assemble, load_tail
from ..engine_core.config import CoreConfig, EngineConfig, refuse_config, resolve_config
from ..engine_core.core import EngineCore
from ..engine_core.device_config import Placement, place
from ..engine_core.memory_parts import CONTEXT_BYTES, OVERRUN_TOKENS
from ..engine_core.memory_plan import MemoryPlan, plan_memory
from ..engine_core.memory_report import memory_line
from ..engine_core.messages import CoreInfo
from ..engine_core.model_config import ModelConfig, ModelConfigError, load_model_config
from ..engine_core.model_path import ModelNotFound, resolve_model
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.safetensors_header import HeaderError, tensor_dtypes
from ..engine_core.step_times import StepTimes, measure_times
from ..engine_core.tensor_parallel import refuse_devices, shard_model
from ..engine_core.trace import TRACE_VERSION, TraceFile, TraceHeader, TraceWriter
from ..engine_core.worker import WorkerInfo
from .agreement import Ranks
from .device_memory import DeviceMemory
from .future_map import FutureMap
from .host_memory import free_memory
from .kv_pool import KVPool
from .measure import StepTimer
from .models import GpuModel, LoadFormat, Model, Share, load_model
from .step import StepRunner
from .threads import choose_num_threads
from .weights import WeightsError
from .worker import EngineWorker, TorchWorker

TRACE_VARIABLE = "OUTRIDER_TRACE"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Engine:
    """An assembled core, its worker, what clients are told of both, and the device's memory."""

    assembly: Assembly
    worker: EngineWorker
    info: CoreInfo
    trace_file: TraceFile | None
    memory: DeviceMemory

    @property
    def core(self) -> EngineCore:
        """The core, which drives the worker."""
        return self.assembly.core

    def shutdown(self) -> None:
        """Stop the worker's thread and close the trace; idempotent."""
        self.worker.shutdown()
        if self.trace_file is not None:
            self.trace_file.close()


def build_engine(config: EngineConfig) -> Engine:
    """Worker, drafter, controller, tail decoder and trace, put together.

    ``OUTRIDER_TRACE`` names a file that records every step. Raises RefusedError naming the flag
    that is at fault.
    """
    worker, memory = _build_worker(config)
    try:
        resolved = resolve_config(config, worker.info())
        if isinstance(resolved, Refused):
            raise RefusedError(resolved)
        with memory.guard("the capture of CUDA graphs"):
            worker.prepare(resolved)
            engine = _assemble(resolved, worker, memory)
        memory.mark("ready")
        report = memory.report()
        if report is not None:
            print(f"outrider: {memory_line(report)}", file=sys.stderr, flush=True)
        return engine
    except BaseException:
        worker.shutdown()
        raise


@dataclass(frozen=True, slots=True)
class Site:
    """Where a rank runs and what of the model it holds; known before anything is loaded.

    ``whole`` is the model, ``model`` the rank's share of it (the same with one rank). ``plan``:
    what the rank will take of its device's memory.
    """

    config: EngineConfig
    folder: Path
    whole: ModelConfig
    model: ModelConfig
    context: int
    placement: Placement
    device: torch.device
    threads: int
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank's weights in memory, and what its device holds so far."""

    site: Site
    model: Model
    memory: DeviceMemory


def build_worker(config: EngineConfig) -> EngineWorker:
    """Load the model and start a worker on it; with ``tp_size`` above 1 start its ranks too.

    Raises RefusedError naming the flag: a model that is missing or unusable, a thread count that
    the machine lacks, a configuration that does not fit into the device's memory, ranks that
    cannot share the model.
    """
    return _build_worker(config)[0]


def _build_worker(config: EngineConfig) -> tuple[EngineWorker, DeviceMemory]:
    site = find_site(config)
    if config.tp_size > 1:
        # Loads torch.distributed, which one rank does not need.
        from .parallel.start import start_ranks

        return start_ranks(site)
    loaded = load_rank(site)
    return make_worker(loaded, site.plan.num_pages), loaded.memory


def find_site(config: EngineConfig, rank: int = 0) -> Site:
    """Check what can be checked before anything is loaded. Raises RefusedError."""
    refused = refuse_config(config)
    if refused is not None:
        raise RefusedError(refused)
    threads = _guard("num_threads", lambda: choose_num_threads(config.num_threads, config.tp_size))
    folder = _guard("model", lambda: resolve_model(config.model, config.revision))
    whole = _guard("model", lambda: load_model_config(folder))
    context = _context_length(config, whole)
    placement = _accepted(place(config, torch.cuda.is_available(), whole.torch_dtype))
    share = _accepted(shard_model(whole, config.tp_size))
    device = torch.device(placement.device)
    if config.tp_size > 1 and device.type == "cuda":
        refused = refuse_devices(config.tp_size, torch.cuda.device_count())
        if refused is not None:
            raise RefusedError(refused)
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)  # nothing of this rank belongs on another one's
    plan = _plan(config, whole, folder, placement, device)
    return Site(config, folder, whole, share, context, placement, device, threads, plan)


def load_rank(site: Site, share: Share | None = None) -> Loaded:
    """Load a rank's weights. Raises RefusedError."""
    device, load_format = site.device, site.config.load_format
    dtype: torch.dtype = getattr(torch, site.placement.dtype)
    memory = DeviceMemory(site.plan, device)
    memory.mark("context")
    with memory.guard("loading"):
        model = _guard(
            "model", lambda: _load(site.folder, site.model, dtype, device, load_format, share)
        )
    memory.release_cache()
    memory.mark("weights")
    return Loaded(site, model, memory)


def make_worker(loaded: Loaded, num_pages: int, group: Ranks | None = None) -> EngineWorker:
    """A worker on a rank's weights with a pool of ``num_pages``; raises RefusedError.

    ``group``: the ranks that share the model, if there are several.
    """
    site, model, memory = loaded.site, loaded.model, loaded.memory
    config, whole, device = site.config, site.whole, site.device
    with memory.guard("the KV pool"):
        kv = _make_pool(loaded, num_pages)
    memory.mark("pool")
    # Finished requests give their slot back a step later; twice the slots let others enter.
    max_slots = 2 * config.max_running_requests
    max_pages = -(-(site.context + OVERRUN_TOKENS) // config.page_size)
    info = WorkerInfo(
        vocab_size=whole.vocab_size,
        context_length=whole.context_length,
        num_pages=kv.num_pages,
        page_size=config.page_size,
        max_slots=max_slots,
        eos_ids=whole.eos_token_ids,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=site.plan.kv_bytes_per_token,
        num_threads=site.threads,
        device=device.type,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    if isinstance(model, GpuModel):
        # Loads triton, which machines without a GPU need not have.
        from .gpu.worker import GpuWorker

        worker = GpuWorker(info, config, model, kv, max_pages, group)
        memory.mark("state")
        return worker
    state = FutureMap(max_slots, max_pages, whole.vocab_size, device)
    timer = StepTimer(model, kv)
    if group is not None:
        from .parallel.cpu_steps import make_cpu_worker

        return make_cpu_worker(info, model, kv, state, timer, config.simulate_accept_length, group)
    runner = StepRunner(model, kv, state, whole.vocab_size, config.simulate_accept_length)
    return TorchWorker(info, runner, timer)


def _assemble(resolved: CoreConfig, worker: EngineWorker, memory: DeviceMemory) -> Engine:
    times: StepTimes | None = None
    if resolved.drafter is not None:
        times = measure_times(worker, resolved.max_running_requests * resolved.draft_width)
    config = resolved.engine
    tail_flag = "model" if config.tokenizer_path is None else "tokenizer_path"
    tail = _guard(tail_flag, lambda: load_tail(config))
    trace_file = _open_trace(resolved, () if times is None else times.knots)
    trace = None if trace_file is None else TraceWriter(trace_file.write)
    assembly = assemble(resolved, worker, times, tail, trace)
    return Engine(assembly, worker, _core_info(resolved), trace_file, memory)


def _core_info(resolved: CoreConfig) -> CoreInfo:
    config, sizes = resolved.engine, resolved.worker
    return CoreInfo(
        model=config.served_model_name or config.model,
        vocab_size=sizes.vocab_size,
        context_length=resolved.context_length,
        eos_ids=sizes.eos_ids,
        max_total_tokens=sizes.num_pages * sizes.page_size,
        page_size=sizes.page_size,
        max_running_requests=resolved.max_running_requests,
        drafter=None if resolved.drafter is None else resolved.drafter.name,
        num_draft_tokens=resolved.draft_width,
        num_threads=sizes.num_threads,
        device=sizes.device,
        dtype=sizes.dtype,
        weight_bytes=sizes.weight_bytes,
        pid=os.getpid(),
        simulated=config.simulate_accept_length is not None,
    )


def _guard(field: str, work: Callable[[], T]) -> T:
    """Run ``work``; its errors become refusals that name the flag."""
    try:
        return work()
    except (ModelNotFound, ModelConfigError, WeightsError, ValueError, OSError) as error:
        text = str(error)
        for name in EngineConfig.__struct_fields__:
            if text.startswith(f"{name}: "):
                raise RefusedError(Refused(name, text.removeprefix(f"{name}: "))) from error
        raise RefusedError(Refused(field, text)) from error


def _accepted(answer: T | Refused) -> T:
    if isinstance(answer, Refused):
        raise RefusedError(answer)
    return answer


def _context_length(config: EngineConfig, model: ModelConfig) -> int:
    if config.context_length is None:
        return model.context_length
    if config.context_length > model.context_length:
        reason = f"{config.context_length} exceeds the model's {model.context_length}; ask for less"
        raise RefusedError(Refused("context_length", reason))
    return config.context_length


def _load(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
    share: Share | None,
) -> Model:
    longer = msgspec.structs.replace(config, context_length=config.context_length + OVERRUN_TOKENS)
    return load_model(folder, longer, dtype, device, load_format, share=share)


def _plan(
    config: EngineConfig,
    model: ModelConfig,
    folder: Path,
    placement: Placement,
    device: torch.device,
) -> MemoryPlan:
    """What this rank will take, before any of it is taken. Raises RefusedError."""
    stored: dict[str, str] = {}
    if config.load_format != "dummy":
        with contextlib.suppress(HeaderError):  # loading says more of what is wrong
            stored = tensor_dtypes(folder)
    if device.type == "cpu":
        free = free_memory()
    else:
        # Asking makes the context, which the plan takes out of what was free before.
        free = torch.cuda.mem_get_info(device)[0] + CONTEXT_BYTES
    return _accepted(plan_memory(config, model, stored, placement, free))


def _make_pool(loaded: Loaded, num_pages: int) -> KVPool:
    site, model = loaded.site, loaded.model
    page_size = site.plan.page_size
    try:
        return KVPool(num_pages, page_size, site.model, model.dtype, site.device)
    except (RuntimeError, MemoryError) as error:
        if site.device.type == "cuda":
            raise  # its numbers say more
        reason = f"{num_pages * page_size} tokens of KV could not be allocated: {error}"
        raise RefusedError(Refused("max_total_tokens", reason)) from error


def _open_trace(config: CoreConfig, knots: tuple[tuple[int, float], ...]) -> TraceFile | None:
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return None
    header = TraceHeader(TRACE_VERSION, config, config.engine.model, knots)
    return _guard(TRACE_VARIABLE, lambda: TraceFile(path, header))
