"""``outrider plan``: what a configuration would take of the memory, without loading anything."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ...engine_core.config import EngineConfig
from ...engine_core.device_config import Device, place
from ...engine_core.draft_source import DraftSource, find_draft
from ...engine_core.host_memory import free_memory
from ...engine_core.memory_plan import GIB, MemoryPlan, memory_parts, plan_memory
from ...engine_core.model_config import ModelConfig, ModelConfigError, load_model_config
from ...engine_core.model_path import ModelNotFound, resolve_model
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.safetensors_header import HeaderError, tensor_dtypes
from ...engine_core.tensor_checks import check_draft_tensors, check_model_tensors
from ..flags import UsageError, add_engine_flags, resolve_engine
from ..json_file import JsonFile

_QUERY = ["--query-gpu=memory.free", "--format=csv,noheader,nounits"]
_QUERY_TIMEOUT_S = 20.0
_MOST_GIB = 1 << 20


def main(args: list[str]) -> int:
    """Print the plan of a configuration; a RefusedError says with numbers why it does not fit."""
    parser = argparse.ArgumentParser(
        prog="outrider plan",
        usage="outrider plan --model MODEL [--gpu-memory GIB | --memory GIB] [--json FILE] [flags]",
        description="Show what weights, KV pool and buffers would take of the device's memory. "
        "Without --device: CUDA if --gpu-memory is given or there is a GPU, else the CPU.",
        allow_abbrev=False,
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument(
        "--gpu-memory",
        type=_gib,
        metavar="GIB",
        help="plan for a GPU with so much free memory (default: that of CUDA's first, by "
        "nvidia-smi)",
    )
    memory.add_argument(
        "--memory",
        type=_gib,
        metavar="GIB",
        help="plan for a CPU with so much free memory (default: this machine's)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the plan here; -: to standard output, and the table to standard error",
    )
    add_engine_flags(parser)
    namespace = parser.parse_args(args)
    config = resolve_engine(namespace)
    for flag, given, other in (
        ("--gpu-memory", namespace.gpu_memory, "cpu"),
        ("--memory", namespace.memory, "cuda"),
    ):
        if given is not None and config.device == other:
            right = "--memory" if other == "cpu" else "--gpu-memory"
            raise UsageError(f"{flag}: is not for --device {other}, whose flag is {right}")
    target = JsonFile("--json", namespace.json)
    plan = make_plan(config, namespace.gpu_memory, namespace.memory)
    target.write_beside(plan, plan_table(plan))
    return 0


def make_plan(
    config: EngineConfig, gpu_memory: int | None = None, memory: int | None = None
) -> MemoryPlan:
    """The plan on a GPU with ``gpu_memory`` free bytes, or on a CPU with ``memory``.

    At most one is given, and fits ``config.device``. With neither the GPU or the machine is asked;
    ``device`` auto then means CUDA if a GPU answers. Raises RefusedError as starting would, and
    UsageError for CUDA without a GPU that could be asked.
    """
    try:
        folder = resolve_model(config.model, config.revision)
        model = load_model_config(folder)
        stored = {} if config.load_format == "dummy" else _stored_types(folder, model)
    except (ModelNotFound, ModelConfigError, HeaderError) as error:
        raise RefusedError(Refused("model", str(error).removeprefix("model: "))) from None
    draft = _draft(config, model)
    if draft is not None:
        config = config.with_shape(draft.shape)
    device, free = _device(config, gpu_memory, memory)
    placement = place(config, device == "cuda", model.torch_dtype)
    if isinstance(placement, Refused):
        raise RefusedError(placement)
    plan = plan_memory(config, model, stored, placement, free, draft)
    if isinstance(plan, Refused):
        raise RefusedError(plan)
    return plan


def first_gpu() -> str | None:
    """The index or UUID of the GPU that CUDA calls 0; None where CUDA_VISIBLE_DEVICES hides all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return "0"
    first = visible.split(",")[0].strip()
    return None if first in ("", "-1", "NoDevFiles") else first


def gpu_free_memory() -> int | None:
    """Free bytes of the first GPU; None without one or without an nvidia-smi that answers."""
    command, gpu = shutil.which("nvidia-smi"), first_gpu()
    if command is None or gpu is None:
        return None
    query = [command, *_QUERY, f"--id={gpu}"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
        return int(done.stdout.split()[0]) << 20  # nvidia-smi counts in MiB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def plan_table(plan: MemoryPlan) -> str:
    """The plan as lines of text, sizes in GiB; what is not there has no line."""
    notes = {"KV pool": f"  {plan.num_tokens:,} tokens, {plan.num_pages:,} pages"}
    rows = [(name, size, notes.get(name, "")) for name, size in memory_parts(plan) if size]
    rows += [
        ("peak", plan.total_bytes, f"  {plan.total_bytes / plan.free_bytes:.1%} of free"),
        ("free", plan.free_bytes, f"  weights and KV may take {plan.mem_fraction:g} of it"),
    ]
    if plan.device == "cuda":
        rows += [
            ("copies while loading", plan.loading_bytes, "  gone before the KV pool is made"),
            (
                "penalties, masks, logprobs",
                plan.edit_bytes,
                "  on top, if all requests ask for them",
            ),
        ]
    lines = [f"{plan.model} in {plan.dtype} on {plan.device}, pages of {plan.page_size} tokens"]
    if plan.tp_size > 1:
        lines.append(f"of {plan.tp_size} ranks, what rank 0 takes of its memory:")
    lines += [f"{name:<26}{size / GIB:>10.3f} GiB{note}" for name, size, note in rows]
    lines.append(f"{'KV a token':<26}{plan.kv_bytes_per_token:>10,} bytes")
    if plan.draft_kv_bytes_per_token:
        lines.append(f"{'draft KV a token':<26}{plan.draft_kv_bytes_per_token:>10,} bytes")
    if plan.draft_window_pages:
        lines.append(
            f"{'draft KV, its window':<26}{plan.draft_kv_bytes / GIB:>10.3f} GiB  "
            f"{plan.draft_window_pages:,} pages; as many as the target's would take "
            f"{plan.full_draft_kv_bytes / GIB:.3f} GiB"
        )
    return "\n".join(lines)


def _draft(config: EngineConfig, target: ModelConfig) -> DraftSource | None:
    """The draft model beside ``target``. Raises RefusedError."""
    draft = find_draft(config, target)
    if draft is not None and draft.load_format != "dummy" and not draft.stored:
        reason = _no_tensors(draft.folder, "--speculative-draft-load-format")
        raise RefusedError(Refused("speculative_draft_model_path", reason))
    if draft is not None and draft.load_format != "dummy":
        try:
            check_draft_tensors(draft.folder, draft.config)
        except HeaderError as error:
            raise RefusedError(Refused("speculative_draft_model_path", str(error))) from None
    for note in () if draft is None else draft.notes:
        print(f"outrider: warning: {note}", file=sys.stderr, flush=True)
    return draft


def _stored_types(folder: Path, model: ModelConfig) -> dict[str, str]:
    """Raises HeaderError, also for a folder without a checkpoint, which cannot be started."""
    stored = tensor_dtypes(folder)
    if not stored:
        raise HeaderError(_no_tensors(folder, "--load-format"))
    check_model_tensors(folder, model)
    return stored


def _no_tensors(folder: Path, flag: str) -> str:
    return (
        f"{folder}: no tensors in model.safetensors, nor by model.safetensors.index.json; only "
        f"safetensors checkpoints are supported; use {flag} dummy to plan on config.json alone"
    )


def _device(config: EngineConfig, gpu: int | None, memory: int | None) -> tuple[Device, int]:
    """The device that is planned for, and its free bytes. Raises UsageError."""
    if gpu is None and memory is None and config.device != "cpu":
        gpu = gpu_free_memory()
        if gpu is None and config.device == "cuda":
            raise UsageError(
                "--gpu-memory: no GPU to ask; give a GPU's free memory in GiB, or use --device cpu"
            )
    if gpu is not None:
        return "cuda", gpu
    return "cpu", free_memory() if memory is None else memory


def _gib(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of GiB, got {text!r}") from None
    if not 0.0 < value <= _MOST_GIB:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {_MOST_GIB} GiB, got {text}")
    return int(value * GIB)
