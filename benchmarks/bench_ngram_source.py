"""What the n-gram drafts' way through the host costs: no drafts, the trie, the match, both.

The same greedy prompts of pycoder in turns, one engine a source; before every round the caches
are emptied, the trie's too. Medians over the rounds. ``wait_us``: time that a late-bound step's
drafts kept the device waiting, by the host's clock; ``gap_us``: idle time of the device between any
two steps, by its own.

    python benchmarks/bench_ngram_source.py --json benchmarks/results/h200-ngram-source.json
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from exactness import Prompt, load_prompts

from outrider.engine.build import build_worker
from outrider.engine.worker import EngineWorker, GraphWorker, counts_between
from outrider.engine_core.assembly import Assembly, assemble
from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import FlushCache, GenerateRequest
from outrider.engine_core.plan import HostDrafts, StepPlan, StepResult
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import measure_times
from outrider.engine_core.worker import WorkerInfo

Source = Literal["plain", "cpu", "gpu", "both"]
SOURCES: tuple[Source, ...] = ("plain", "cpu", "gpu", "both")


class WatchedWorker:
    """A worker that notes of each late-bound step how long its drafts were waited for."""

    def __init__(self, worker: EngineWorker) -> None:
        self.worker = worker
        self.late: set[int] = set()
        self.waits: list[int] = []

    def info(self) -> WorkerInfo:
        return self.worker.info()

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        return self.worker.measure(batch_tokens)

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        return self.worker.measure_drafting(rows)

    def launch(self, plan: StepPlan) -> None:
        if plan.late_bound:
            self.late.add(plan.step)
        self.worker.launch(plan)

    def upload_drafts(self, drafts: HostDrafts) -> None:
        self.worker.upload_drafts(drafts)

    def collect(self) -> StepResult:
        result = self.worker.collect()
        if result.step in self.late:
            self.late.remove(result.step)
            self.waits.append(result.wait_ns)
        return result

    def reset(self) -> None:
        self.worker.reset()

    def shutdown(self) -> None:
        self.worker.shutdown()


class Engine(NamedTuple):
    """A core of one source; ``build_s``: loading, tuning and capturing graphs."""

    assembly: Assembly
    worker: WatchedWorker
    build_s: float


def build(source: Source, policy: Literal["auto", "fixed"], batch: int, device: str) -> Engine:
    began = time.perf_counter()
    drafts: dict[str, object] = {}
    if source != "plain":
        drafts = {
            "speculative_algorithm": "NGRAM",
            "speculative_ngram_source": source,
            "speculative_length_policy": policy,
        }
    config = EngineConfig(
        model="pycoder",
        device=device,  # type: ignore[arg-type]
        max_running_requests=batch,
        max_total_tokens=65536,
        **drafts,  # type: ignore[arg-type]
    )
    worker = WatchedWorker(build_worker(config))
    resolved = resolve_config(config, worker.info())
    if isinstance(resolved, Refused):
        raise SystemExit(f"{resolved.field}: {resolved.reason}")
    worker.worker.prepare(resolved)
    times = None
    if resolved.drafter is not None:
        times = measure_times(worker, resolved.max_running_requests * resolved.draft_width)
    return Engine(
        assemble(resolved, worker, times, None, None), worker, time.perf_counter() - began
    )


def run_round(
    engine: Engine, prompts: Sequence[Prompt], batch: int
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """All prompts, ``batch`` at a time: figures and outputs."""
    core, worker = engine.assembly.core, engine.worker
    refused = engine.assembly.control(FlushCache(call=0))
    if refused is not None:
        raise SystemExit(refused.reason)
    worker.waits.clear()
    gc.collect()
    before = core.stats(0)
    graphs = worker.worker if isinstance(worker.worker, GraphWorker) else None
    counts = None if graphs is None else graphs.counts
    outputs: dict[str, list[int]] = {prompt.id: [] for prompt in prompts}
    waiting, running = list(reversed(prompts)), 0
    began = time.perf_counter()
    while waiting or core.has_work:
        while waiting and running < batch:
            prompt = waiting.pop()
            params = SamplingParams(
                temperature=0.0, max_new_tokens=prompt.max_tokens, ignore_eos=True
            )
            tokens = np.asarray(prompt.tokens, dtype=np.int32).tobytes()
            refused = core.submit(GenerateRequest(prompt.id, tokens, params, stream=False))
            if refused is not None:
                raise SystemExit(refused.reason)
            running += 1
        for output in core.step():
            outputs[output.rid].extend(i32(output.tokens).tolist())
            running -= output.finish is not None
    seconds = time.perf_counter() - began
    after = core.stats(0)
    steps = after.steps - before.steps
    drafted = after.spec_drafts - before.spec_drafts
    plain = after.plain_rows - before.plain_rows
    figures = {
        "tokens_per_s": (after.generated_tokens - before.generated_tokens) / seconds,
        "steps_per_s": steps / seconds,
        "step_us": seconds / steps * 1e6,
        "accept_length": (after.spec_verify_tokens - before.spec_verify_tokens) / max(1, drafted),
        "drafted_rows": drafted / max(1, drafted + plain),
        "late_steps": len(worker.waits) / steps,
        "wait_us": sum(worker.waits) / max(1, len(worker.waits)) / 1e3,
        "wait_share": sum(worker.waits) * 1e-9 / seconds,
    }
    if counts is not None and graphs is not None:
        since = counts_between(counts, graphs)
        figures["gap_us"] = since.gap_ns / steps / 1e3
        figures["replay_share"] = since.replays / max(1, since.decode_steps)
    return figures, outputs


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def main() -> None:
    """Measure every source at every batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, default=24, help="spread over the prompts file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length-policy", choices=("auto", "fixed"), default="fixed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    prompts = load_prompts(args.prompts, args.max_tokens)
    engines = {
        source: build(source, args.length_policy, max(args.batch_sizes), args.device)
        for source in args.sources
    }
    for engine in engines.values():
        run_round(engine, prompts[:8], 8)
    gc.freeze()
    rows: list[dict[str, object]] = []
    for batch in args.batch_sizes:
        found: dict[str, list[dict[str, float]]] = {source: [] for source in engines}
        outputs: dict[str, dict[str, list[int]]] = {}
        for _ in range(args.rounds):
            for source, engine in engines.items():
                figures, outputs[source] = run_round(engine, prompts, batch)
                found[source].append(figures)
        first = outputs[args.sources[0]]
        for source, rounds in found.items():
            row: dict[str, object] = {"source": source, "batch": batch, **medians(rounds)}
            row["tokens_per_s_rounds"] = [figures["tokens_per_s"] for figures in rounds]
            row["differing_outputs"] = sum(outputs[source][p.id] != first[p.id] for p in prompts)
            rows.append(row)
            print(json.dumps(row), flush=True)
    report = {
        "command": "python benchmarks/bench_ngram_source.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "dtype": next(iter(engines.values())).worker.info().dtype,
        "prompts": len(prompts),
        "length_policy": args.length_policy,
        "build_s": {source: engine.build_s for source, engine in engines.items()},
        "rows": rows,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    for engine in engines.values():
        engine.worker.shutdown()


if __name__ == "__main__":
    main()
