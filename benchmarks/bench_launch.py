"""CPU time of a plain decode step around a GPU: plan, pack, fill, commit; no device is needed.

The worker packs and fills as the GPU's does and answers at once, so the step's time is the host's
alone, less the CUDA calls. On a small model this is what the device waits for.

    python benchmarks/bench_launch.py --json benchmarks/results/launch-cpu.json
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outrider.engine.gpu.packer import Packed, StepPacker, fill
from outrider.engine.gpu.staging import field_lengths
from outrider.engine.gpu.tier_shapes import tier_staging
from outrider.engine.gpu.tiers import Tier
from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.core import EngineCore
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.plan import HostDrafts, StepPlan, StepResult
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.worker import WorkerInfo

CONTEXT, STEPS, WARM_UP = 512, 400, 40


class InstantWorker:
    """Does the host's part of a GPU worker's steps; every row emits token 7."""

    def __init__(self, rows: int) -> None:
        self._info = WorkerInfo(
            vocab_size=8192,
            context_length=16384,
            num_pages=64 * 1024,
            page_size=16,
            max_slots=2 * rows,
            eos_ids=(0,),
            weight_bytes=0,
            kv_bytes_per_token=0,
            num_threads=1,
            device="cpu",
            dtype="float32",
        )
        self._packer = StepPacker(2 * rows, 8192)
        self._flying: deque[tuple[int, Packed]] = deque()
        self.pack_ns: list[int] = []
        self.fill_ns: list[int] = []

    def info(self) -> WorkerInfo:
        """Sizes that the core plans with."""
        return self._info

    def launch(self, plan: StepPlan) -> None:
        """Pack the step and write its block."""
        began = time.perf_counter_ns()
        packed = self._packer.pack(plan, None)
        packed_at = time.perf_counter_ns()
        if packed.decode_only:
            shape = tier_staging(Tier(packed.rows, packed.rows, 1, False), 16)
            block = np.empty(sum(field_lengths(shape)), dtype=np.int32)
            fill(block, shape, packed, plan, self._info.max_slots)
            self.fill_ns.append(time.perf_counter_ns() - packed_at)
            self.pack_ns.append(packed_at - began)
        self._flying.append((plan.step, packed))

    def collect(self) -> StepResult:
        """The oldest step's result."""
        step, packed = self._flying.popleft()
        lens = (np.diff(packed.node_cu) > 0).astype(np.int32)
        tokens = np.full(int(lens.sum()), 7, dtype=np.int32)
        return StepResult(
            step=step,
            accept_lens=lens.tobytes(),
            tokens=tokens.tobytes(),
            proposed=bytes(4 * packed.rows),
            depths=packed.depths.tobytes(),
            batch_tokens=packed.tokens,
        )

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        """Nothing takes time here."""
        return [1e-6] * len(batch_tokens)

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        """Nothing takes time here."""
        return [1e-6] * len(rows)

    def upload_drafts(self, drafts: HostDrafts) -> None:
        """No step waits for drafts."""
        raise RuntimeError(f"drafts came for step {drafts.step}")

    def reset(self) -> None:
        """There is nothing to forget."""

    def shutdown(self) -> None:
        """There is nothing to wait for."""


def measure(rows: int) -> dict[str, float]:
    """Microseconds of a step, medians, and its parts."""
    worker = InstantWorker(rows)
    config = resolve_config(
        EngineConfig(model="x", max_running_requests=rows, chunked_prefill_size=8192),
        worker.info(),
    )
    assert not isinstance(config, Refused), config
    core = EngineCore(config, worker, check=False)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=STEPS + 3 * WARM_UP, temperature=0.0, ignore_eos=True)
    for i in range(rows):
        prompt = rng.integers(1, 8000, CONTEXT, dtype=np.int32).tobytes()
        refused = core.submit(GenerateRequest(f"r{i}", prompt, params))
        assert refused is None, refused
    for _ in range(WARM_UP):
        core.step()
    gc.collect()
    gc.freeze()
    worker.pack_ns.clear()
    worker.fill_ns.clear()
    before, times = core.stats(0), []
    for _ in range(STEPS):
        began = time.perf_counter_ns()
        core.step()
        times.append(time.perf_counter_ns() - began)
    after = core.stats(0)
    assert len(core.scheduler.batch.decoding) == rows
    return {
        "rows": rows,
        "step_us": statistics.median(times) / 1e3,
        "step_p90_us": float(np.percentile(times, 90)) / 1e3,
        "plan_us": (after.plan_cpu - before.plan_cpu) / STEPS * 1e6,
        "pack_us": statistics.median(worker.pack_ns) / 1e3,
        "fill_us": statistics.median(worker.fill_ns) / 1e3,
        "commit_us": (after.commit_cpu - before.commit_cpu) / STEPS * 1e6,
    }


def main() -> int:
    """Measure some batches, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32, 64])
    args = parser.parse_args()
    found = [measure(rows) for rows in args.batch_sizes]
    for row in found:
        print(" ".join(f"{name} {value:.1f}" for name, value in row.items()))
    if args.json:
        command = "python benchmarks/bench_launch.py " + " ".join(sys.argv[1:])
        args.json.write_text(json.dumps({"command": command, "rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
