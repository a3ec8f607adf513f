"""``outrider plan``: what a configuration would take of the memory, without loading anything."""

import argparse
import shutil
import subprocess
from pathlib import Path

import msgspec

from ...engine_core.config import EngineConfig
from ...engine_core.device_config import place
from ...engine_core.memory_plan import GIB, MemoryPlan, memory_parts, plan_memory
from ...engine_core.model_config import ModelConfigError, load_model_config
from ...engine_core.model_path import resolve_model
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.safetensors_header import HeaderError, tensor_dtypes
from ..errors import OutriderError
from ..flags import UsageError, add_engine_flags, resolve_engine

_QUERY = ["--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]
_QUERY_TIMEOUT_S = 20.0


def main(args: list[str]) -> int:
    """Print the plan of a configuration; a RefusedError says with numbers why it does not fit."""
    parser = argparse.ArgumentParser(
        prog="outrider plan",
        usage="outrider plan --model MODEL [--gpu-memory GIB] [--json FILE] [flags]",
        description="Show what weights, KV pool and buffers would take of the device's memory.",
        allow_abbrev=False,
    )
    parser.add_argument(
        *("--gpu-memory", "--memory"),
        type=_gib,
        metavar="GIB",
        dest="memory",
        help="free memory of the device in GiB (default: what nvidia-smi says of GPU 0)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan here")
    add_engine_flags(parser)
    namespace = parser.parse_args(args)
    plan = make_plan(resolve_engine(namespace), namespace.memory)
    if namespace.json is not None:
        encoded = msgspec.json.format(msgspec.json.encode(plan))
        Path(namespace.json).write_bytes(encoded + b"\n")
    print(plan_table(plan))
    return 0


def make_plan(config: EngineConfig, memory: int | None) -> MemoryPlan:
    """The plan on a device with ``memory`` free bytes; None: ask nvidia-smi.

    ``device`` auto means CUDA here, unless no GPU was found. Raises RefusedError, UsageError,
    ModelNotFound, and OutriderError for a model folder that cannot be read.
    """
    if memory is None and config.device != "cpu":
        memory = gpu_memory()
    if memory is None:
        raise UsageError("--gpu-memory: no GPU to ask; give the device's free memory in GiB")
    folder = resolve_model(config.model, config.revision)
    try:
        model = load_model_config(folder)
    except ModelConfigError as error:
        raise RefusedError(Refused("model", str(error))) from None
    try:
        stored = {} if config.load_format == "dummy" else tensor_dtypes(folder)
    except HeaderError as error:
        raise OutriderError(str(error)) from None
    placement = place(config, True, model.torch_dtype)
    if isinstance(placement, Refused):
        raise RefusedError(placement)
    plan = plan_memory(config, model, stored, placement, memory)
    if isinstance(plan, Refused):
        raise RefusedError(plan)
    return plan


def gpu_memory() -> int | None:
    """Free bytes of GPU 0; None without an nvidia-smi that answers."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, *_QUERY], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
        return int(done.stdout.split()[0]) << 20  # nvidia-smi counts in MiB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def plan_table(plan: MemoryPlan) -> str:
    """The plan as lines of text, sizes in GiB."""
    notes = {
        "KV pool": f"  {plan.num_tokens:,} tokens, {plan.num_pages:,} pages",
        "CUDA graphs": "" if plan.graph_bytes else "  (none)",
    }
    rows = [(name, size, notes.get(name, "")) for name, size in memory_parts(plan)]
    rows += [
        ("peak", plan.total_bytes, f"  {plan.total_bytes / plan.free_bytes:.1%} of free"),
        ("free", plan.free_bytes, f"  weights and KV may take {plan.mem_fraction:g} of it"),
    ]
    if plan.device == "cuda":
        rows += [
            ("copies while loading", plan.loading_bytes, "  gone before the KV pool is made"),
            ("penalties, logprobs", plan.edit_bytes, "  on top, if all requests ask for them"),
        ]
    lines = [f"{plan.model} in {plan.dtype} on {plan.device}, pages of {plan.page_size} tokens"]
    if plan.tp_size > 1:
        lines.append(f"of {plan.tp_size} ranks, what rank 0 takes of its memory:")
    lines += [f"{name:<26}{size / GIB:>10.3f} GiB{note}" for name, size, note in rows]
    lines.append(f"{'KV a token':<26}{plan.kv_bytes_per_token:>10,} bytes")
    return "\n".join(lines)


def _gib(text: str) -> int:
    value = float(text)
    if not 0.0 < value < 2**30:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return int(value * GIB)
