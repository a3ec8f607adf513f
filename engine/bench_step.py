"""The measuring process of ``outrider bench step``: ``python -m outrider.engine.bench_step``.

Reads one ``StepBenchSpec`` line from standard input and answers with one ``StepBenchAnswer`` line
on standard output; what it is doing goes to standard error.
"""

import os
import sys
import time
import traceback
from collections.abc import Iterator

import msgspec
import torch

from ..engine_core.config import refuse_config
from ..engine_core.draft_source import DraftSource, find_draft
from ..engine_core.messages import CoreInfo
from ..engine_core.model_config import ModelConfig, ModelConfigError, load_model_config
from ..engine_core.model_path import ModelNotFound, resolve_model
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.step_bench import (
    PrefillRow,
    StepBenchAnswer,
    StepBenchReport,
    StepBenchSpec,
    StepRow,
    decode_spec,
    encode_line,
    shown_rate,
)
from ..engine_core.step_floor import streamed_bytes
from ..engine_core.tensor_parallel import shard_model
from .bench.core_prefill import CorePrefill, prefill_row
from .bench.core_steps import CoreSteps
from .bench.device_steps import DeviceSteps
from .bench.rates import measure_rates
from .bench.sizes import sized
from .bench.timing import Case, Machine, make_row
from .build import Engine, build_engine
from .child_stdout import take_stdout

# As in a core process, whose loop this measures.
_SWITCH_INTERVAL_S = 100e-6


def main() -> int:
    """Run the process; returns its exit status."""
    answer_out = take_stdout()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        answer = StepBenchAnswer(report=measure(decode_spec(sys.stdin.buffer.readline())))
    except msgspec.MsgspecError as error:
        answer = StepBenchAnswer(message=f"the request is not valid: {error}")
    except RefusedError as error:
        answer = StepBenchAnswer(field=error.refused.field, message=error.refused.reason)
    except Exception as error:
        traceback.print_exc()
        answer = StepBenchAnswer(message=f"the steps could not be measured: {error!r}")
    with answer_out:
        answer_out.write(encode_line(answer))
    return 0 if answer.report is not None else 1


def measure(spec: StepBenchSpec) -> StepBenchReport:
    """Build the engine once and measure every case on it. Raises RefusedError."""
    began = time.perf_counter()
    model = _model_config(spec)
    draft = find_draft(spec.config, model)
    if draft is not None:
        drafting = msgspec.structs.replace(
            spec.config.with_shape(draft.shape), speculative_length_policy="fixed"
        )
        spec = msgspec.structs.replace(spec, config=drafting)
    config = sized(spec, min(spec.config.context_length or 2**31, model.context_length))
    if isinstance(config, Refused):
        raise RefusedError(config)
    refused = refuse_config(config)
    if refused is not None:
        raise RefusedError(refused)
    engine = build_engine(config)
    try:
        built = time.perf_counter()
        _say(f"built in {built - began:.1f} s")
        info = engine.info
        machine = _machine(engine, model, draft)
        engine.memory.forget_peak()
        # The core's loop before what drives its worker without it.
        prefills = list(_prefills(engine, spec, machine))
        rows = list(_rows(engine, spec, machine))
        engine.memory.mark("serving")
        return StepBenchReport(
            model=info.model,
            device=info.device,
            device_name=_device_name(info),
            dtype=info.dtype,
            torch=str(torch.__version__),
            copy_gb_per_s=machine.rates.copy * 1e-9,
            matmul_tflop_per_s=machine.rates.matmul * 1e-12,
            weight_bytes=info.weight_bytes,
            streamed_bytes=machine.streamed_bytes,
            kv_bytes_per_token=machine.kv_bytes_per_token,
            kv_pool_tokens=info.max_total_tokens,
            build_s=built - began,
            seconds=time.perf_counter() - began,
            rows=rows,
            prefills=prefills,
            memory=engine.memory.report(),
            config=config,
        )
    finally:
        engine.shutdown()


def _model_config(spec: StepBenchSpec) -> ModelConfig:
    """The model as rank 0 holds it: floors are those of its device."""
    try:
        model = load_model_config(resolve_model(spec.config.model, spec.config.revision))
    except (ModelNotFound, ModelConfigError) as error:
        raise RefusedError(Refused("model", str(error).removeprefix("model: "))) from error
    share = shard_model(model, spec.config.tp_size)
    if isinstance(share, Refused):
        raise RefusedError(share)
    return share


def _machine(engine: Engine, model: ModelConfig, draft: DraftSource | None) -> Machine:
    info = engine.info
    rates = measure_rates(torch.device(info.device), getattr(torch, info.dtype))
    _say(f"copy {rates.copy * 1e-9:.1f} GB/s, matmul {shown_rate(rates.matmul * 1e-12)} TFLOP/s")
    return Machine(
        model,
        rates,
        streamed_bytes(model, info.weight_bytes, info.device, info.dtype),
        engine.worker.info().kv_bytes_per_token,
        info.dtype,
        draft,
        info.simulated,
    )


def _prefills(engine: Engine, spec: StepBenchSpec, machine: Machine) -> Iterator[PrefillRow]:
    if not spec.prefill_lengths:
        return
    prefill = CorePrefill(engine, spec)
    for length in spec.prefill_lengths:
        for batch in spec.batch_sizes:
            chunk = spec.config.chunked_prefill_size
            chunk = batch * length if chunk == -1 else chunk
            timing = prefill.measure(batch, length)
            row = prefill_row(machine.model, machine.rates, batch, length, chunk, timing)
            _say(
                f"prefill of {batch} x {length} tokens in chunks of {chunk}: {row.wall_ms:.1f} ms, "
                f"{shown_rate(row.tflop_per_s)} TFLOP/s, {row.matmul_share:.1%} of the matmul rate"
            )
            yield row


def _rows(engine: Engine, spec: StepBenchSpec, machine: Machine) -> Iterator[StepRow]:
    """The core's loop first: what follows drives its worker without it."""
    shapes = [(batch, context) for context in spec.contexts for batch in spec.batch_sizes]
    if not shapes:
        return
    if machine.draft is not None:
        core, length = CoreSteps(engine, spec), machine.draft.shape.num_draft_tokens - 1
        for batch, context in shapes:
            case = Case(mode="round", batch_size=batch, context=context, draft_length=length)
            yield _told(make_row(machine, case, core.measure(case)))
        return
    if 0 in spec.draft_lengths:
        core = CoreSteps(engine, spec)
        for batch, context in shapes:
            case = Case(mode="engine", batch_size=batch, context=context, draft_length=0)
            yield _told(make_row(machine, case, core.measure(case)))
    lengths = sorted({0, *spec.draft_lengths})
    if lengths == [0]:
        return
    device = DeviceSteps(engine.worker, spec)
    # Length by length: a change of width captures graphs anew.
    plain: dict[tuple[int, int], StepRow] = {}
    for drafts in lengths:
        for batch, context in shapes:
            case = Case(mode="device_only", batch_size=batch, context=context, draft_length=drafts)
            row = make_row(machine, case, device.measure(case), plain.get((batch, context)))
            if drafts == 0:
                plain[batch, context] = row
            yield _told(row)


def _device_name(info: CoreInfo) -> str:
    if info.device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {info.num_threads} threads"


def _told(row: StepRow) -> StepRow:
    _say(
        f"{row.mode} batch {row.batch_size} context {row.context} drafts {row.draft_length}: "
        f"{row.wall_ms:.3f} ms, floor {row.floor_ms:.3f} ms"
    )
    return row


def _say(text: str) -> None:
    print(f"bench step: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    # As a core process: what a device or a rank still holds must not hold the process.
    os._exit(exit_status)
