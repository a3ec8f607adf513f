"""From a user's configuration to a worker and to an engine core that drives it."""

import os
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
from ..engine_core.messages import CoreInfo
from ..engine_core.model_config import ModelConfig, ModelConfigError, load_model_config
from ..engine_core.model_path import ModelNotFound, resolve_model
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.step_times import StepTimes, measure_times
from ..engine_core.tensor_parallel import refuse_devices, shard_model
from ..engine_core.trace import TRACE_VERSION, TraceFile, TraceHeader, TraceWriter
from ..engine_core.worker import WorkerInfo
from .agreement import Ranks
from .future_map import FutureMap
from .host_memory import free_memory
from .kv_pool import KVPool, bytes_per_token, plan_num_pages
from .measure import StepTimer
from .models import GpuModel, LoadFormat, Model, Share, load_model
from .step import StepRunner
from .threads import choose_num_threads
from .weights import WeightsError
from .worker import EngineWorker, TorchWorker

# Steps in flight may run a finished request past its context: two rows of 64 tokens.
_OVERRUN_TOKENS = 130
# Without --max-total-tokens the pool holds this much for each running request, or two contexts.
_TOKENS_PER_REQUEST = 1024
TRACE_VARIABLE = "OUTRIDER_TRACE"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Engine:
    """An assembled core, its worker, and what clients are told of both."""

    assembly: Assembly
    worker: EngineWorker
    info: CoreInfo
    trace_file: TraceFile | None

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
    worker = build_worker(config)
    try:
        resolved = resolve_config(config, worker.info())
        if isinstance(resolved, Refused):
            raise RefusedError(resolved)
        worker.prepare(resolved)
        return _assemble(resolved, worker)
    except BaseException:
        worker.shutdown()
        raise


@dataclass(frozen=True, slots=True)
class Site:
    """Where a rank runs and what of the model it holds; known before anything is loaded.

    ``whole`` is the model, ``model`` the rank's share of it (the same with one rank).
    """

    config: EngineConfig
    folder: Path
    whole: ModelConfig
    model: ModelConfig
    context: int
    placement: Placement
    device: torch.device
    threads: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank's weights in memory. ``num_pages``: pages of KV that fit beside them."""

    site: Site
    model: Model
    num_pages: int


def build_worker(config: EngineConfig) -> EngineWorker:
    """Load the model and start a worker on it; with ``tp_size`` above 1 start its ranks too.

    Raises RefusedError naming the flag: a model that is missing or unusable, a thread count that
    the machine lacks, a KV pool that does not fit, ranks that cannot share the model.
    """
    site = find_site(config)
    if config.tp_size > 1:
        # Loads torch.distributed, which one rank does not need.
        from .parallel.start import start_ranks

        return start_ranks(site)
    loaded = load_rank(site)
    return make_worker(loaded, loaded.num_pages)


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
    return Site(config, folder, whole, share, context, placement, device, threads)


def load_rank(site: Site, share: Share | None = None) -> Loaded:
    """Load a rank's weights. Raises RefusedError."""
    config, device = site.config, site.device
    if device.type == "cpu":
        free_bytes = free_memory() // config.tp_size  # the ranks share the machine's memory
    else:
        free_bytes = torch.cuda.mem_get_info(device)[0]
    dtype: torch.dtype = getattr(torch, site.placement.dtype)
    model = _guard(
        "model",
        lambda: _load(site.folder, site.model, dtype, device, config.load_format, share),
    )
    memory = (free_bytes, site.placement.mem_fraction)
    return Loaded(site, model, _fitting_pages(config, site.model, model, memory, site.context))


def make_worker(loaded: Loaded, num_pages: int, group: Ranks | None = None) -> EngineWorker:
    """A worker on a rank's weights with a pool of ``num_pages``; raises RefusedError.

    ``group``: the ranks that share the model, if there are several.
    """
    site, model = loaded.site, loaded.model
    config, whole, device = site.config, site.whole, site.device
    kv = _make_pool(config, site.model, model, num_pages, device)
    # Finished requests give their slot back a step later; twice the slots let others enter.
    max_slots = 2 * config.max_running_requests
    max_pages = -(-(site.context + _OVERRUN_TOKENS) // config.page_size)
    info = WorkerInfo(
        vocab_size=whole.vocab_size,
        context_length=whole.context_length,
        num_pages=kv.num_pages,
        page_size=config.page_size,
        max_slots=max_slots,
        eos_ids=whole.eos_token_ids,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=bytes_per_token(site.model, model.dtype),
        num_threads=site.threads,
        device=device.type,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    if isinstance(model, GpuModel):
        # Loads triton, which machines without a GPU need not have.
        from .gpu.worker import GpuWorker

        return GpuWorker(info, config, model, kv, max_pages, group)
    state = FutureMap(max_slots, max_pages, whole.vocab_size, device)
    timer = StepTimer(model, kv)
    if group is not None:
        from .parallel.cpu_steps import make_cpu_worker

        return make_cpu_worker(info, model, kv, state, timer, config.simulate_accept_length, group)
    runner = StepRunner(model, kv, state, whole.vocab_size, config.simulate_accept_length)
    return TorchWorker(info, runner, timer)


def _assemble(resolved: CoreConfig, worker: EngineWorker) -> Engine:
    times: StepTimes | None = None
    if resolved.drafter is not None:
        times = measure_times(worker, resolved.max_running_requests * resolved.draft_width)
    config = resolved.engine
    tail_flag = "model" if config.tokenizer_path is None else "tokenizer_path"
    tail = _guard(tail_flag, lambda: load_tail(config))
    trace_file = _open_trace(resolved, () if times is None else times.knots)
    trace = None if trace_file is None else TraceWriter(trace_file.write)
    assembly = assemble(resolved, worker, times, tail, trace)
    return Engine(assembly, worker, _core_info(resolved), trace_file)


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
    longer = msgspec.structs.replace(config, context_length=config.context_length + _OVERRUN_TOKENS)
    return load_model(folder, longer, dtype, device, load_format, share=share)


def _fitting_pages(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Model,
    memory: tuple[int, float],
    context: int,
) -> int:
    enough = max(2 * context, config.max_running_requests * _TOKENS_PER_REQUEST)
    pages = _guard(
        "mem_fraction_static",
        lambda: plan_num_pages(
            *memory,
            model.weight_bytes,
            config.page_size,
            bytes_per_token(model_config, model.dtype),
            config.max_total_tokens or enough,
        ),
    )
    if config.max_total_tokens is not None and pages < config.max_total_tokens // config.page_size:
        raise RefusedError(
            Refused(
                "max_total_tokens",
                f"{config.max_total_tokens} tokens of KV do not fit beside the weights; the memory "
                f"allows {pages * config.page_size}; ask for less or raise --mem-fraction-static",
            )
        )
    return pages


def _make_pool(
    config: EngineConfig, model_config: ModelConfig, model: Model, pages: int, device: torch.device
) -> KVPool:
    try:
        return KVPool(pages, config.page_size, model_config, model.dtype, device)
    except (RuntimeError, MemoryError) as error:
        reason = f"{pages * config.page_size} tokens of KV could not be allocated: {error}"
        raise RefusedError(Refused("max_total_tokens", reason)) from error


def _open_trace(config: CoreConfig, knots: tuple[tuple[int, float], ...]) -> TraceFile | None:
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return None
    header = TraceHeader(TRACE_VERSION, config, config.engine.model, knots)
    return _guard(TRACE_VARIABLE, lambda: TraceFile(path, header))
