"""Planned against measured memory of an engine on a GPU, and what running out of it says.

A child process a case builds the engine, runs a full batch of short requests, a prompt longer than
a prefill chunk beside it and decode steps of all of them, greedy and then sampled, and reports the
device's memory after each stage. ``ratio`` is the plan of ``outrider plan`` (this process asks
nvidia-smi before the child starts) over the peak on the device; ``torch_ratio`` leaves the CUDA
context out on both sides. ``stages`` say which part of a plan is wrong: each stage's growth inside
and outside torch's allocator. Cases that cannot fit are refused before anything is loaded.

    python benchmarks/memory_gpu.py --json benchmarks/results/h200-memory.json
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.memory_report import MemoryReport
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.sampling_params import SamplingParams
from outrider.frontend.commands.plan import first_gpu, gpu_free_memory, make_plan

# As one would type it: results name it.
QWEN = os.path.relpath(Path(__file__).parent / "configs" / "qwen3-8b")
EAGLE3 = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": f"{QWEN}-eagle3",
    "speculative_length_policy": "fixed",
}
TREE = {
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
}
SHORT_TOKENS, NEW_TOKENS, DECODE_STEPS = 16, 400, 24
LIMIT = 0.05  # of the measured peak


def config(model: str, **fields: Any) -> EngineConfig:
    """Dummy bfloat16 weights, token ids in and out."""
    made = EngineConfig(
        model=model,
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        skip_tokenizer_init=True,
    )
    return msgspec.structs.replace(made, **fields)


CASES = {
    "pycoder": config("pycoder"),
    "pycoder, fixed pool": config("pycoder", max_total_tokens=32768, chunked_prefill_size=4096),
    "qwen3-8b": config(QWEN),
    "qwen3-8b, fixed pool": config(QWEN, max_total_tokens=65536, chunked_prefill_size=8192),
    "qwen3-8b, EAGLE3": config(QWEN, **EAGLE3),
    "qwen3-8b, EAGLE3 trees": config(QWEN, **EAGLE3, **TREE),
    "pycoder, STANDALONE": config(
        "pycoder",
        speculative_algorithm="STANDALONE",
        speculative_length_policy="fixed",
    ),
}
TOO_LARGE = {
    "a tiny fraction": config(QWEN, mem_fraction_static=0.05),
    "a huge pool": config(QWEN, max_total_tokens=10_000_000),
    "no room beside the pool": config(
        QWEN, mem_fraction_static=0.98, max_running_requests=4096, chunked_prefill_size=-1
    ),
}


class Work(msgspec.Struct):
    """What a child is to do: build each configuration, and run the engine if it is the only one."""

    configs: list[EngineConfig]


class Done(msgspec.Struct):
    """A configuration's memory, or why it was refused; ``allocated``: torch's peak by then."""

    memory: MemoryReport | None
    refused: str
    seconds: float
    allocated: int


def run_child() -> None:
    """Read ``Work``, write a list of ``Done`` as the last line."""
    import torch

    from outrider.engine.build import build_engine

    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    done: list[Done] = []
    for wanted in work.configs:
        began = time.perf_counter()
        try:
            engine = build_engine(wanted)
        except RefusedError as error:
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            done.append(Done(None, str(error), time.perf_counter() - began, peak))
            continue
        try:
            for sampled in (False, True):
                exercise(engine, wanted, sampled)
                engine.memory.mark("sampled" if sampled else "greedy")
            seconds = time.perf_counter() - began
            done.append(Done(engine.memory.report(), "", seconds, 0))
        finally:
            engine.shutdown()
    print(msgspec.json.encode(done).decode(), flush=True)


def exercise(engine: Any, wanted: EngineConfig, sampled: bool) -> None:
    """A full batch that decodes, with prefill chunks of the largest size beside it."""
    core, info = engine.core, engine.info
    running, rng = info.max_running_requests, np.random.default_rng(0)
    batch = core.scheduler.batch

    def submit(name: int, tokens: int) -> None:
        params = SamplingParams(
            max_new_tokens=NEW_TOKENS,
            temperature=0.8 if sampled else 0.0,
            top_p=0.9 if sampled else 1.0,
            ignore_eos=True,
        )
        prompt = rng.integers(0, info.vocab_size, tokens, dtype=np.int32)
        refused = core.submit(GenerateRequest(f"memory-{name}", prompt.tobytes(), params))
        if refused is not None:
            raise RuntimeError(f"{refused.field}: {refused.reason}")

    def wait_for(count: int) -> None:
        for _ in range(200):
            if len(batch.decoding) == count and not batch.prefilling:
                return
            core.step()
        raise RuntimeError(f"{count} requests did not come to decode together")

    for i in range(running - 1):
        submit(i, SHORT_TOKENS)
    wait_for(running - 1)
    longest = info.context_length - NEW_TOKENS - 1
    submit(running - 1, min(longest, 2 * wanted.chunked_prefill_size + SHORT_TOKENS))
    wait_for(running)
    for _ in range(DECODE_STEPS):
        core.step()
    for i in range(running):
        core.abort(f"memory-{i}")
    while core.has_work:
        core.step()
    core.flush_cache()


def child(configs: list[EngineConfig]) -> list[Done]:
    """Run a child on ``configs``."""
    ran = subprocess.run(
        [sys.executable, __file__, "--child"],
        input=msgspec.json.encode(Work(configs)),
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=list[Done])


def device_in_use() -> int:
    """Bytes that the first GPU holds for others, by nvidia-smi; 0 where there is none."""
    command, gpu = shutil.which("nvidia-smi"), first_gpu()
    if command is None or gpu is None:
        return 0
    query = [command, "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


def measured(name: str, wanted: EngineConfig) -> dict[str, object]:
    """One case's row."""
    idle, free = device_in_use(), gpu_free_memory()
    (done,) = child([wanted])
    if done.memory is None:
        raise RuntimeError(f"{name}: {done.refused or 'there is no CUDA device'}")
    plan = done.memory.plan if free is None else make_plan(wanted, free)
    peak = done.memory.peak_device_bytes - idle
    torch_peak = max(stage.peak_reserved_bytes for stage in done.memory.stages)
    stages, before = [], (idle, 0, 0)
    for stage in done.memory.stages:
        now = (stage.other_bytes, stage.reserved_bytes, stage.allocated_bytes)
        growth = [after - earlier for after, earlier in zip(now, before, strict=True)]
        stages.append(
            {
                "stage": stage.stage,
                "outside_torch_growth": growth[0],
                "torch_reserved_growth": growth[1],
                "tensors_growth": growth[2],
                "torch_peak_reserved": stage.peak_reserved_bytes,
                "torch_peak_allocated": stage.peak_allocated_bytes,
            }
        )
        before = now
    row: dict[str, object] = {
        "case": name,
        "planned_bytes": plan.total_bytes,
        "measured_bytes": peak,
        "ratio": plan.total_bytes / peak,
        "within_limit": abs(plan.total_bytes / peak - 1) <= LIMIT,
        "torch_ratio": (plan.total_bytes - plan.context_bytes) / torch_peak,
        "outside_torch_bytes": max(stage.other_bytes for stage in done.memory.stages) - idle,
        "idle_device_bytes": idle,
        "seconds": done.seconds,
        "stages": stages,
        "plan": msgspec.to_builtins(plan),
        "planned_by_engine": done.memory.plan.total_bytes,
        "config": msgspec.to_builtins(wanted),
    }
    print(
        f"{name}: planned {plan.total_bytes / 1e9:.3f} GB, measured {peak / 1e9:.3f} GB, "
        f"ratio {row['ratio']:.3f}, without the context {row['torch_ratio']:.3f}",
        file=sys.stderr,
        flush=True,
    )
    return row


def main() -> int:
    """Measure; 1 if a plan is off by more than the limit or something too large was not refused."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the results here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", action="append", choices=CASES, help="only this case")
    args = parser.parse_args()
    if args.child:
        run_child()
        return 0
    began = time.perf_counter()
    rows = [measured(name, CASES[name]) for name in args.case or CASES]
    refusals = [
        {
            "case": name,
            "refused": done.refused,
            "seconds": done.seconds,
            "allocated": done.allocated,
        }
        for name, done in zip(TOO_LARGE, child(list(TOO_LARGE.values())), strict=True)
    ]
    report = {
        "command": shlex.join(["python", "benchmarks/memory_gpu.py", *sys.argv[1:]]),
        "limit": LIMIT,
        "rows": rows,
        "refusals": refusals,
        "seconds": time.perf_counter() - began,
    }
    text = json.dumps(report, indent=1) + "\n"
    if args.json:
        Path(args.json).write_text(text)
    else:
        print(text, end="")
    early = all(r["refused"] and not r["allocated"] for r in refusals)
    return 0 if early and all(row["within_limit"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
