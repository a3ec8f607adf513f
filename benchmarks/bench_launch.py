"""CPU time of a decode step around a GPU, over graphs that do nothing; no device is needed.

The core drives the GPU's own worker, which packs, fills, replays and reads as ever, but a replay
launches nothing: its answer stands in the output from the start. So a step's time is the host's
alone, less CUDA's part of it (launches, events, copies). On a small model the device waits for it.

    python benchmarks/bench_launch.py --json benchmarks/results/launch-cpu.json

The model is the embedded one: plain steps, and steps that verify all that its drafts propose (mode
static), by length policy. Microseconds of the thread's CPU clock, medians
over all turns: of a whole ``step``, of ``plan``, of the worker's ``launch`` and ``collect``, and
of the ``rest``: commit, outputs, and what is learned from drafts. Each turn has a process of its
own. ``--before``: another checkout, built, that takes turns with this one.
"""

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from outrider.engine.forward_batch import ForwardBatch
from outrider.engine.gpu import worker as worker_module
from outrider.engine.gpu.graphs import StepGraph, StepGraphs
from outrider.engine.gpu.tiers import Tier
from outrider.engine.kv_pool import KVPool
from outrider.engine.models import TargetModel
from outrider.engine.rank_worker import find_site, load_rank, make_worker
from outrider.engine_core.assembly import assemble
from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.core import EngineCore
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import StepTimes
from outrider.engine_core.worker import Worker

HERE = Path(__file__).resolve().parents[1]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eagle3 fixed": {"speculative_algorithm": "EAGLE3", "speculative_length_policy": "fixed"},
    "eagle3 auto": {"speculative_algorithm": "EAGLE3"},
    "dspark fixed": {"speculative_algorithm": "DSPARK", "speculative_length_policy": "fixed"},
}
PROMPT, WARM_UP = 24, 60
STEPS, PARTS_OF = 300, 200  # steps timed as a whole, and by their parts
EMITS = 3  # tokens of a verify row with drafts

Result = TypeVar("Result")


class NoLaunch:
    """A recording without anything in it."""

    def replay(self) -> None:
        """Launch nothing."""


class SilentGraphs(StepGraphs):
    """Graphs whose output has an answer from the start."""

    def capture_all(self, tiers: Iterable[Tier]) -> None:
        """Each when it is first needed."""

    def _record(self, launch: Callable[[], object]) -> NoLaunch:
        return NoLaunch()

    def _capture(self, tier: Tier) -> StepGraph:
        graph = super()._capture(tier)
        graph.out.zero_()
        out = self._step.split_output(graph.out, tier.all_rows, tier.width)
        out.accept_lens.fill_(1)
        out.tokens.fill_(7)
        if out.proposed is not None and out.depths is not None:
            out.accept_lens[: tier.rows] = EMITS
            out.proposed[: tier.rows] = out.depths[: tier.rows] = tier.width - 1
        return graph


class IdleModel:
    """A model of which a GPU's worker sees the tables alone."""

    def __init__(self, model: TargetModel) -> None:
        self.weight_bytes, self.dtype = model.weight_bytes, model.dtype
        self.embedding, self.output_head = model.embedding, model.output_head

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Nothing runs."""
        raise AssertionError("a step was launched kernel by kernel")

    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing runs."""
        raise AssertionError("a step was launched kernel by kernel")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Nothing runs."""
        raise AssertionError("a step was launched kernel by kernel")

    raw_logits = logits

    def tune(self, rows: Iterable[int]) -> None:
        """There is nothing to choose."""


class Clock:
    """CPU time of the thread in calls of some functions, microseconds by name."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[..., Result]) -> Callable[..., Result]:
        """``call``, whose time counts under ``name``."""
        spent = self.spent[name] = []

        def timed(*args: object) -> Result:
            began = time.thread_time_ns()
            result = call(*args)
            spent.append((time.thread_time_ns() - began) / 1e3)
            return result

        return timed


def make_core(kind: str, rows: int) -> tuple[EngineCore, Worker]:
    """A core on a GPU's worker that has a CPU's tensors."""
    vars(worker_module)["StepGraphs"] = SilentGraphs
    config = EngineConfig(
        model="pycoder",
        device="cpu",
        max_running_requests=rows,
        chunked_prefill_size=1024,
        max_total_tokens=rows * 2200,
        skip_tokenizer_init=True,
        **KINDS[kind],
    )
    site = find_site(config)
    loaded = load_rank(site)
    idle: Any = IdleModel(loaded.model)
    worker = make_worker(dataclasses.replace(loaded, model=idle), site.plan.num_pages)
    resolved = resolve_config(site.config, worker.info())
    assert not isinstance(resolved, Refused), resolved
    worker.prepare(resolved)
    times = drafting = None
    if resolved.drafter is not None:
        times = StepTimes([1, rows * resolved.draft_width], [1e-3, 1.1e-3])
        drafting = StepTimes([1, max(2, rows)], [1e-4, 1e-4])
    return assemble(resolved, worker, times, None, None, drafting).core, worker


def measure(kind: str, rows: int) -> dict[str, list[float]]:
    """Microseconds of some steps, and of the parts of some more."""
    core, worker = make_core(kind, rows)
    params = SamplingParams(temperature=0.0, max_new_tokens=1900, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(rows):
        prompt = rng.integers(1, 8000, PROMPT, dtype=np.int32).tobytes()
        refused = core.submit(GenerateRequest(f"r{i}", prompt, params, stream=False))
        assert refused is None, refused
    for _ in range(WARM_UP):
        core.step()
    gc.collect()
    gc.freeze()
    clock = Clock()
    step, before = clock.timed("step", core.step), core.stats(0)
    for _ in range(STEPS):
        step()
    core.scheduler.plan = clock.timed("plan", core.scheduler.plan)  # type: ignore[method-assign]
    worker.launch = clock.timed("launch", worker.launch)  # type: ignore[method-assign]
    worker.collect = clock.timed("collect", worker.collect)  # type: ignore[method-assign]
    for _ in range(PARTS_OF):
        core.step()
    after = core.stats(0)
    assert len(core.scheduler.batch.decoding) == rows
    assert after.steps - before.steps == STEPS + PARTS_OF
    drafted = after.spec_drafts - before.spec_drafts
    least = 0.9 * rows * (STEPS + PARTS_OF) if core.config.drafter is not None else 0
    assert least <= drafted <= max(0, after.generated_tokens * least), drafted
    return clock.spent


def apart(checkout: Path, kind: str, rows: int) -> dict[str, list[float]]:
    """``measure`` in a process of its own, with the package of ``checkout``."""
    path = os.pathsep.join((str(checkout / "src"), str(HERE / "benchmarks")))
    done = subprocess.run(
        [sys.executable, __file__, "--one", kind, str(rows)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OUTRIDER_CHECK": "0"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(checkouts: dict[str, Path], kind: str, rows: int, turns: int) -> dict[str, object]:
    """A row of the report."""
    row: dict[str, object] = {"kind": kind, "rows": rows}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    for _ in range(turns):
        for name, checkout in checkouts.items():
            for part, times in apart(checkout, kind, rows).items():
                found[name].setdefault(part, []).extend(times)
    for name, parts in found.items():
        medians = {part: statistics.median(times) for part, times in parts.items()}
        medians["rest"] = 2 * medians["step"] - sum(medians.values())
        row[name] = {f"{part}_us": round(value, 1) for part, value in medians.items()}
    return row


def main() -> int:
    """Measure kinds of steps at some batch sizes, print and write them."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    args = parser.parse_args()
    checkouts = {"now": HERE}
    if args.before is not None:
        checkouts["before"] = args.before.resolve()
    found = []
    for kind in args.kinds:
        for rows in args.batch_sizes:
            found.append(compare(checkouts, kind, rows, args.turns))
            print(json.dumps(found[-1]), flush=True)
    if args.json:
        command = "python benchmarks/bench_launch.py " + " ".join(sys.argv[1:])
        args.json.write_text(json.dumps({"command": command, "rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
