"""Thread CPU time of the core a step: 64 running requests, 12-token trees, accept length about 2.

The worker costs nothing: it walks each draft tree along a random text in which a token has a few
likely successors, so that NGRAM's trees are full and about one draft a row is right.

    python benchmarks/bench_core.py --json core.json
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from outrider.engine_core.config import EngineConfig, resolve_config
from outrider.engine_core.controller import LengthController
from outrider.engine_core.core import EngineCore
from outrider.engine_core.host_drafter import HostProposal
from outrider.engine_core.ids import I32, RowKind, i32
from outrider.engine_core.messages import CoreStats, GenerateRequest
from outrider.engine_core.ngram import NgramProposer
from outrider.engine_core.plan import HostDrafts, StepPlan, StepResult
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import StepTimes
from outrider.engine_core.worker import WorkerInfo

VOCAB = 8192


class TimedDrafter:
    """NGRAM with the thread CPU time of its two calls a step."""

    def __init__(self, inner: NgramProposer) -> None:
        self._inner = inner
        self.open = inner.open
        self.close = inner.close
        self.flush = inner.flush
        self.nanoseconds = 0

    def extend(self, slots: I32, cu: I32, tokens: I32) -> None:
        began = time.thread_time_ns()
        self._inner.extend(slots, cu, tokens)
        self.nanoseconds += time.thread_time_ns() - began

    def propose(self, slots: I32, caps: I32) -> HostProposal:
        began = time.thread_time_ns()
        trees = self._inner.propose(slots, caps)
        self.nanoseconds += time.thread_time_ns() - began
        return trees

    @property
    def node_count(self) -> int:
        return self._inner.node_count


class TextWorker:
    """Emits a random text and accepts the drafts that follow it."""

    def __init__(self, rows: int, successors: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._successors = [
            [self._random.randrange(1, VOCAB) for _ in range(successors)] for _ in range(VOCAB)
        ]
        self._rows = rows
        self._last: dict[int, int] = {}
        self._plans: list[StepPlan] = []
        self._drafts: list[HostDrafts] = []
        self.accepted = 0
        self.verified = 0

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            vocab_size=VOCAB,
            context_length=16384,
            num_pages=64 * 1024,
            page_size=16,
            max_slots=self._rows,
            eos_ids=(0,),
            weight_bytes=0,
            kv_bytes_per_token=0,
            num_threads=1,
            device="cpu",
            dtype="float32",
        )

    def measure(self, batch_tokens: Sequence[int]) -> list[float]:
        return [1e-3 for _ in batch_tokens]

    def measure_drafting(self, rows: Sequence[int]) -> list[float]:
        return [1e-3 for _ in rows]

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def upload_drafts(self, drafts: HostDrafts) -> None:
        self._drafts.append(drafts)

    def reset(self) -> None:
        self._last.clear()

    def shutdown(self) -> None:
        self._plans.clear()

    def text(self, length: int) -> list[int]:
        """A piece of text, as prompts are."""
        out = [self._random.randrange(1, VOCAB)]
        while len(out) < length:
            out.append(self._next(out[-1]))
        return out

    def collect(self) -> StepResult:
        plan = self._plans.pop(0)
        rows = plan.num_rows
        counts, tokens, parents = [0] * rows, list[int](), list[int]()
        if plan.late_bound:
            drafts = self._drafts.pop(0)
            counts = i32(drafts.counts).tolist()
            tokens, parents = i32(drafts.tokens).tolist(), i32(drafts.parents).tolist()
        for init in plan.inits:
            self._last[init.slot] = int(i32(init.prompt)[-1])
        runs: list[list[int]] = []
        at = 0
        for row, slot in enumerate(i32(plan.slots).tolist()):
            tree = list(
                zip(parents[at : at + counts[row]], tokens[at : at + counts[row]], strict=True)
            )
            at += counts[row]
            runs.append([] if plan.kinds[row] == RowKind.PREFILL else self._walk(slot, tree))
            if counts[row]:
                self.accepted += len(runs[-1])
                self.verified += 1
        return StepResult(
            step=plan.step,
            accept_lens=_int32([len(run) for run in runs]),
            tokens=_int32([token for run in runs for token in run]),
            proposed=_int32(counts),
            depths=_int32([min(count, 5) for count in counts]),
            busy_ns=1_000_000,
            batch_tokens=rows + sum(counts),
        )

    def _walk(self, slot: int, tree: list[tuple[int, int]]) -> list[int]:
        children = {(parent, token): node + 1 for node, (parent, token) in enumerate(tree)}
        node: int | None = 0
        run: list[int] = []
        while node is not None:
            token = self._next(self._last[slot])
            self._last[slot] = token
            run.append(token)
            node = children.get((node, token))
        return run

    def _next(self, token: int) -> int:
        choices = self._successors[token]
        return choices[min(int(self._random.expovariate(0.75)), len(choices) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--successors", type=int, default=24)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = measure(args.rows, args.steps, args.warmup, args.successors)
    for name, value in report.items():
        print(f"{name:>28}: {value}")
    if args.json is not None:
        command = "python benchmarks/bench_core.py " + " ".join(sys.argv[1:])
        args.json.write_text(json.dumps({"command": command, **report}, indent=1) + "\n")


def measure(rows: int, steps: int, warmup: int, successors: int) -> dict[str, float]:
    worker = TextWorker(rows, successors, seed=1)
    engine = EngineConfig(model="bench", max_running_requests=rows, speculative_algorithm="NGRAM")
    config = resolve_config(engine, worker.info())
    assert not isinstance(config, Refused)
    controller = LengthController(
        StepTimes([1, 2048], [1e-3, 1.1e-3]), rows, config.draft_width - 1, "fixed"
    )
    drafter = TimedDrafter(NgramProposer(engine.ngram()))
    core = EngineCore(
        config,
        worker,
        host_drafter=drafter,
        controller=controller,
        check=False,
    )
    for i in range(rows):
        params = SamplingParams(max_new_tokens=12000, temperature=0.0)
        prompt = _int32(worker.text(400 + 2 * i))
        assert core.submit(GenerateRequest(rid=f"r{i}", prompt=prompt, params=params)) is None
    seen = [core.stats(0)]
    drafting = [0]
    for step in range(warmup + steps):
        core.step()
        if step == warmup:
            gc.collect()
            gc.freeze()
            worker.accepted = worker.verified = 0
        if step >= warmup:
            seen.append(core.stats(0))
            drafting.append(drafter.nanoseconds)
    ngram_us = statistics.median((b - a) / 1e3 for a, b in pairwise(drafting[1:]))
    return summarize(seen[1:], worker, rows) | {"ngram_lookup_and_insert_us": round(ngram_us, 1)}


def summarize(seen: list[CoreStats], worker: TextWorker, rows: int) -> dict[str, float]:
    def median_us(field: str) -> float:
        times = [1e6 * float(getattr(b, field) - getattr(a, field)) for a, b in pairwise(seen)]
        return round(statistics.median(times), 1)

    both = statistics.median(
        1e6 * (b.plan_cpu - a.plan_cpu + b.commit_cpu - a.commit_cpu) for a, b in pairwise(seen)
    )
    drafts = seen[-1].spec_draft_tokens - seen[0].spec_draft_tokens
    return {
        "rows": rows,
        "steps": len(seen) - 1,
        "plan_us": median_us("plan_cpu"),
        "commit_us": median_us("commit_cpu"),
        "plan_and_commit_us": round(both, 1),
        "drafts_in_all_us": median_us("propose_cpu"),
        "accept_length": round(worker.accepted / max(1, worker.verified), 3),
        "drafts_a_row": round(drafts / max(1, worker.verified), 2),
    }


def _int32(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


if __name__ == "__main__":
    main()
