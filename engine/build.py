"""From a user's configuration to a worker and to an engine core that drives it."""

import os
import sys
from dataclasses import dataclass

from ..engine_core.accept_rules import rule_notes
from ..engine_core.assembly import Assembly, assemble, load_tail
from ..engine_core.config import CoreConfig, EngineConfig, resolve_config
from ..engine_core.core import EngineCore
from ..engine_core.memory_report import memory_line
from ..engine_core.messages import CoreInfo
from ..engine_core.processor_loader import processors_of
from ..engine_core.ragged_verify import VARIABLE, ragged_notes, with_environment
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.step_times import StepTimes, measure_drafting, measure_times
from ..engine_core.trace import TRACE_VARIABLE, TRACE_VERSION, TraceFile, TraceHeader, TraceWriter
from .device_memory import DeviceMemory
from .rank_worker import find_site, guard, load_rank, make_worker
from .worker import EngineWorker


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
    config, worker, memory = _build_worker(config)
    try:
        resolved = resolve_config(config, worker.info())
        if isinstance(resolved, Refused):
            raise RefusedError(resolved)
        notes = ragged_notes(config, resolved.ragged, resolved.worker.device)
        for note in rule_notes(config) + notes:
            print(f"outrider: warning: {note}", file=sys.stderr, flush=True)
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


def build_worker(config: EngineConfig) -> EngineWorker:
    """Load the model and start a worker on it; with ``tp_size`` above 1 start its ranks too.

    Raises RefusedError naming the flag: a model that is missing or unusable, a thread count that
    the machine lacks, a configuration that does not fit into the device's memory, ranks that
    cannot share the model.
    """
    return _build_worker(config)[1]


def _build_worker(config: EngineConfig) -> tuple[EngineConfig, EngineWorker, DeviceMemory]:
    """The worker, the configuration with all that its models decide, and the device's memory."""
    config = guard(VARIABLE, lambda: with_environment(config))
    site = find_site(config)
    if config.tp_size > 1:
        # Loads torch.distributed, which one rank does not need.
        from .parallel.start import start_ranks

        return site.config, *start_ranks(site)
    loaded = load_rank(site)
    return site.config, make_worker(loaded, site.plan.num_pages), loaded.memory


def _assemble(resolved: CoreConfig, worker: EngineWorker, memory: DeviceMemory) -> Engine:
    times: StepTimes | None = None
    drafting: StepTimes | None = None
    if resolved.drafter is not None:
        times = measure_times(worker, resolved.max_running_requests * resolved.draft_width)
        if resolved.drafter.drafting_takes_time:
            drafting = measure_drafting(worker, resolved.max_running_requests)
    config = resolved.engine
    tail_flag = "model" if config.tokenizer_path is None else "tokenizer_path"
    tail = guard(tail_flag, lambda: load_tail(config))
    trace_file = _open_trace(resolved, times, drafting)
    trace = None if trace_file is None else TraceWriter(trace_file.write)
    assembly = assemble(resolved, worker, times, tail, trace, drafting)
    return Engine(assembly, worker, _core_info(resolved), trace_file, memory)


def _core_info(resolved: CoreConfig) -> CoreInfo:
    config, sizes, drafter = resolved.engine, resolved.worker, resolved.drafter
    return CoreInfo(
        model=config.served_model_name or config.model,
        vocab_size=sizes.vocab_size,
        context_length=resolved.context_length,
        eos_ids=sizes.eos_ids,
        max_total_tokens=sizes.num_pages * sizes.page_size,
        page_size=sizes.page_size,
        max_running_requests=resolved.max_running_requests,
        drafter=None if drafter is None else drafter.name,
        num_draft_tokens=resolved.draft_width,
        num_threads=sizes.num_threads,
        device=sizes.device,
        dtype=sizes.dtype,
        weight_bytes=sizes.weight_bytes,
        pid=os.getpid(),
        draft_shape=config.shape(drafter) if drafter is not None and drafter.has_model else None,
        simulated=config.simulated,
        processors=_processor_names(resolved),
    )


def _processor_names(config: CoreConfig) -> tuple[str, ...]:
    processors = processors_of(config)
    return () if processors is None else tuple(name for name, _ in processors.loaded)


def _open_trace(
    config: CoreConfig, times: StepTimes | None, drafting: StepTimes | None
) -> TraceFile | None:
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return None
    step_times, draft_times = (() if t is None else t.knots for t in (times, drafting))
    header = TraceHeader(TRACE_VERSION, config, config.engine.model, step_times, draft_times)
    return guard(TRACE_VARIABLE, lambda: TraceFile(path, header))
