"""A rank's worker: where it runs, what it will take, its weights, its pool and its loop."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from ..engine_core.config import EngineConfig, refuse_config, served_context
from ..engine_core.device_config import Placement, place
from ..engine_core.draft_config import SpecShape
from ..engine_core.draft_source import DraftSource, find_draft
from ..engine_core.draft_window import window_pool
from ..engine_core.host_memory import free_memory
from ..engine_core.memory_parts import CONTEXT_BYTES, OVERRUN_TOKENS
from ..engine_core.memory_plan import MemoryPlan, plan_memory
from ..engine_core.model_config import ModelConfig, ModelConfigError, load_model_config
from ..engine_core.model_path import ModelNotFound, resolve_model
from ..engine_core.ragged_verify import own_sts
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.safetensors_header import HeaderError, tensor_dtypes
from ..engine_core.tensor_parallel import refuse_devices, shard_model
from ..engine_core.worker import WorkerInfo
from .agreement import Ranks
from .device_memory import DeviceMemory
from .future_map import FutureMap
from .kv_pool import KVPool
from .measure import StepTimer
from .models import GpuModel, LoadFormat, Share, TargetModel, load_model
from .models.block_loader import load_block_draft
from .models.block_net import BlockNet
from .models.draft_loader import load_draft
from .models.draft_net import DraftNet
from .speculative.device_drafter import LoadedModel, loaded_model
from .step import StepRunner
from .threads import choose_num_threads
from .weights import WeightsError
from .window_pages import WindowPages
from .worker import EngineWorker, TorchWorker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a rank runs and what of the model it holds; known before anything is loaded.

    ``config`` says how much is drafted, if anything is. ``whole`` is the model, ``model`` the
    rank's share of it (the same with one rank), ``draft`` the draft model of algorithms that have
    one. ``plan``: what the rank will take of its device's memory.
    """

    config: EngineConfig
    folder: Path
    whole: ModelConfig
    model: ModelConfig
    draft: DraftSource | None
    context: int
    placement: Placement
    device: torch.device
    threads: int
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank's weights in memory, and what its device holds so far.

    ``draft``: the draft model of algorithms that have one.
    """

    site: Site
    model: TargetModel
    draft: DraftNet | BlockNet | None
    memory: DeviceMemory


def find_site(config: EngineConfig, rank: int = 0) -> Site:
    """Check what can be checked before anything is loaded. Raises RefusedError."""
    refused = refuse_config(config)
    if refused is not None:
        raise RefusedError(refused)
    threads = guard("num_threads", lambda: choose_num_threads(config.num_threads, config.tp_size))
    folder = guard("model", lambda: resolve_model(config.model, config.revision))
    whole = guard("model", lambda: load_model_config(folder))
    context = _accepted(served_context(config, whole.context_length))
    draft = find_draft(config, whole)
    if draft is not None:
        config = _resolved(config, draft)
    placement = _accepted(place(config, torch.cuda.is_available(), whole.torch_dtype))
    share = _accepted(shard_model(whole, config.tp_size))
    device = torch.device(placement.device)
    if config.tp_size > 1 and device.type == "cuda":
        refused = refuse_devices(config.tp_size, torch.cuda.device_count())
        if refused is not None:
            raise RefusedError(refused)
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)  # nothing of this rank belongs on another one's
    plan = _plan(config, whole, folder, placement, device, draft)
    return Site(config, folder, whole, share, draft, context, placement, device, threads, plan)


def load_rank(site: Site, share: Share | None = None) -> Loaded:
    """Load a rank's weights. Raises RefusedError."""
    device, load_format = site.device, site.config.load_format
    dtype: torch.dtype = getattr(torch, site.placement.dtype)
    memory = DeviceMemory(site.plan, device)
    memory.mark("context")
    with memory.guard("loading"):
        model = guard(
            "model", lambda: _load(site.folder, site.model, dtype, device, load_format, share)
        )
    memory.release_cache()
    memory.mark("weights")
    draft: DraftNet | BlockNet | None = None
    source = site.draft
    if source is not None:
        with memory.guard("loading the draft"):
            draft = guard(
                "speculative_draft_model_path", lambda: _load_draft(source, model, dtype, device)
            )
        memory.release_cache()
        memory.mark("draft weights")
    return Loaded(site, model, draft, memory)


def make_worker(loaded: Loaded, num_pages: int, group: Ranks | None = None) -> EngineWorker:
    """A worker on a rank's weights with a pool of ``num_pages``; raises RefusedError.

    ``group``: the ranks that share the model, if there are several.
    """
    site, model, memory = loaded.site, loaded.model, loaded.memory
    config, whole, device = site.config, site.whole, site.device
    # Finished requests give their slot back a step later; twice the slots let others enter.
    max_slots = 2 * config.max_running_requests
    draft: LoadedModel | None = None
    with memory.guard("the KV pool"):
        kv = _make_pool(site, site.model, model.dtype, num_pages)
        if loaded.draft is not None and site.draft is not None:
            draft = _with_pool(site, loaded.draft, site.draft.shape, num_pages, max_slots)
    memory.mark("pool")
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
        draft_survival=_gives_survival(site.draft),
    )
    if isinstance(model, GpuModel):
        # Loads triton, which machines without a GPU need not have.
        from .gpu.worker import GpuWorker

        worker = GpuWorker(info, config, model, kv, max_pages, group, draft)
        memory.mark("state")
        return worker
    state = FutureMap(max_slots, max_pages, whole.vocab_size, device)
    timer = StepTimer(model, kv)
    if group is not None:
        from .parallel.cpu_steps import make_cpu_worker

        return make_cpu_worker(info, model, kv, state, timer, config.simulate_accept_length, group)
    runner = StepRunner(model, kv, state, whole.vocab_size, config.simulate_accept_length)
    return TorchWorker(info, runner, timer, draft)


def guard(field: str, work: Callable[[], T]) -> T:
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


def _load(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
    share: Share | None,
) -> TargetModel:
    longer = msgspec.structs.replace(config, context_length=config.context_length + OVERRUN_TOKENS)
    return load_model(folder, longer, dtype, device, load_format, share=share)


def _load_draft(
    source: DraftSource, target: TargetModel, dtype: torch.dtype, device: torch.device
) -> DraftNet | BlockNet:
    if source.config.block is not None:
        return load_block_draft(
            source.folder, source.config, target, dtype, device, source.load_format
        )
    return load_draft(
        source.folder,
        source.config,
        target,
        dtype,
        device,
        source.load_format,
        token_map=source.token_map,
        int8=source.int8,
    )


def _resolved(config: EngineConfig, draft: DraftSource) -> EngineConfig:
    """The configuration with the draft's shape and the temperatures that come with its confidence
    head; says on standard error what that changes.
    """
    config, notes = config.with_shape(draft.shape), list(draft.notes)
    block = draft.config.block
    if block is not None and block.confidence:
        found = guard(
            "speculative_draft_model_path", lambda: own_sts(config, draft.folder, block.drafts)
        )
        config, notes = found.config, [*notes, *found.notes]
    for note in notes:
        print(f"outrider: warning: {note}", file=sys.stderr, flush=True)
    return config


def _plan(
    config: EngineConfig,
    model: ModelConfig,
    folder: Path,
    placement: Placement,
    device: torch.device,
    draft: DraftSource | None,
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
    return _accepted(plan_memory(config, model, stored, placement, free, draft))


def _with_pool(
    site: Site, net: DraftNet | BlockNet, shape: SpecShape, num_pages: int, max_slots: int
) -> LoadedModel:
    """The draft with as many pages as the target has, ``num_pages``, or with a window's pool."""
    width, config = shape.num_draft_tokens, site.config
    own = window_pool(config, site.context, config.page_size, width)
    if own is None:
        return loaded_model(net, _make_pool(site, net.config.model, net.dtype, num_pages), shape)
    pool = _make_pool(site, net.config.model, net.dtype, own.pages - 1)
    slots = max_slots + 1  # a GPU's padding has one of its own
    pages = WindowPages(own, width, num_pages, config.page_size, slots, site.device)
    return loaded_model(net, pool, shape, pages)


def _gives_survival(draft: DraftSource | None) -> bool:
    block = None if draft is None else draft.config.block
    return block is not None and block.confidence


def _make_pool(site: Site, model: ModelConfig, dtype: torch.dtype, num_pages: int) -> KVPool:
    page_size = site.plan.page_size
    try:
        return KVPool(num_pages, page_size, model, dtype, site.device)
    except (RuntimeError, MemoryError) as error:
        if site.device.type == "cuda":
            raise  # its numbers say more
        reason = f"{num_pages * page_size} tokens of KV could not be allocated: {error}"
        raise RefusedError(Refused("max_total_tokens", reason)) from error
