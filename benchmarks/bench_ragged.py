"""Does DSPARK's compact mode keep up with the better of plain and static decoding, batch by batch?

    python benchmarks/bench_ragged.py --model benchmarks/configs/qwen3-8b --load-format dummy \
        --draft benchmarks/configs/qwen3-8b-dspark --simulate-survival 0.8 --json ragged.json

Three engines decode one after the other: plain, DSPARK in mode static that drafts and verifies in
full at every step, and DSPARK in mode compact under the length policy auto, which may leave steps
without drafts, with an SPS table that is measured in the same run as ``outrider profile sps`` does
it. At each batch size they enter so many requests, and once all of them decode, ``--steps`` steps
are timed, in ``--turns`` turns. ``compact_over_best``: compact's tokens a second over those of the
better other one.

With ``--simulate-survival MEAN`` no model is trained: drafts are accepted by the process of
kernels/simulate_survival.py, which also gives the confidence that the planner sees. A request's
difficulty is Beta-distributed and drifts with its position; what is accepted depends on slot and
position alone. The report and every row of it then say ``simulated``. Without it the drafts' own
texts count, behind ``--prompts``.
"""

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from outrider.engine.build import Engine, build_engine
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.draft_source import find_draft
from outrider.engine_core.ids import I32
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.sps_table import AdditiveTable, SpsTable, StepTable, read_sps
from outrider.frontend.bench.steps import bench_steps
from outrider.frontend.profiling.costs import Sweep, costs_text, fit_costs, measure_costs

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARM_UP = 8


class Load(NamedTuple):
    """What an engine is given: ``prompts``, cut to ``context`` tokens; none: random ones.

    ``most``: tokens that a step may emit for a request.
    """

    batches: tuple[int, ...]
    prompts: list[list[int]]
    context: int
    steps: int
    turns: int
    most: int

    def new_tokens(self) -> int:
        """So many that no request ends while it is timed; the first ones wait for the last."""
        return (WARM_UP + self.steps + self.entry() + 4) * self.most

    def entry(self) -> int:
        """Steps until all prompts are in, with chunks of 8,192 tokens, twice as many at most."""
        return 4 + 2 * (-(-max(self.batches) * self.context // 8192))

    def sized(self, config: EngineConfig) -> EngineConfig:
        """With room for the largest batch."""
        tokens = self.context + self.new_tokens() + 192
        return msgspec.structs.replace(
            config,
            max_running_requests=max(self.batches),
            max_total_tokens=max(self.batches) * (tokens + 2 * config.page_size),
            chunked_prefill_size=8192,
            skip_tokenizer_init=True,
        )


class Found(NamedTuple):
    """Of a batch size; tokens emitted and drafts verified ``_per_row`` are of a row and step."""

    batch: int
    tokens_per_s: float
    step_ms: float
    tokens_per_row: float
    verified_per_row: float
    simulated: bool


def time_batch(engine: Engine, load: Load, batch: int, turn: int) -> tuple[float, int, int, int]:
    """Seconds, tokens, and drafts verified of the timed steps, and how many these were."""
    core, rng = engine.core, np.random.default_rng((batch, turn))
    params = SamplingParams(temperature=0.0, max_new_tokens=load.new_tokens(), ignore_eos=True)
    for index in range(batch):
        if load.prompts:
            prompt = load.prompts[(turn * batch + index) % len(load.prompts)]
            tokens: I32 = np.array(prompt[-load.context :], np.int32)
        else:
            tokens = rng.integers(0, engine.info.vocab_size, load.context, dtype=np.int32)
        refused = core.submit(GenerateRequest(str(index), tokens.tobytes(), params, stream=False))
        if refused is not None:
            raise SystemExit(f"a request was refused: {refused}")
    for _ in range(4 * load.entry() + batch):
        decoding = core.scheduler.batch
        if len(decoding.decoding) == batch and not decoding.prefilling:
            break
        core.step()
    for _ in range(WARM_UP):
        core.step()
    before, begin = core.stats(0), time.perf_counter()
    for _ in range(load.steps):
        core.step()
    seconds, after = time.perf_counter() - begin, core.stats(0)
    if len(core.scheduler.batch.decoding) != batch:
        raise SystemExit(f"batch {batch}: requests ended while they were timed")
    for index in range(batch):
        core.abort(str(index))
    while core.has_work:
        core.step()
    core.flush_cache()
    emitted = after.generated_tokens - before.generated_tokens
    verified = after.spec_draft_tokens - before.spec_draft_tokens
    return seconds, emitted, verified, load.steps


def measure(config: EngineConfig, load: Load) -> list[Found]:
    """Every batch size on one engine."""
    engine = build_engine(load.sized(config))
    found = []
    try:
        for batch in load.batches:
            turns = [time_batch(engine, load, batch, turn) for turn in range(load.turns)]
            seconds, emitted, verified, steps = (sum(each) for each in zip(*turns, strict=True))
            rows = batch * steps
            found.append(
                Found(
                    batch,
                    round(emitted / seconds, 2),
                    round(seconds / steps * 1e3, 4),
                    round(emitted / rows, 4),
                    round(verified / rows, 4),
                    engine.info.simulated,
                )
            )
            print(found[-1], file=sys.stderr, flush=True)
    finally:
        engine.shutdown()
    return found


def apart(config: EngineConfig, load: Load) -> list[Found]:
    """``measure`` in a process of its own, which leaves the device as it was."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, config, load).result()


def compare(found: dict[str, list[Found]]) -> list[dict[str, object]]:
    """A row a batch size; policies side by side."""
    rows: list[dict[str, object]] = []
    for plain, static, compact in zip(*found.values(), strict=True):
        best = max(plain.tokens_per_s, static.tokens_per_s)
        by_name = zip(found, (plain, static, compact), strict=True)
        rows.append(
            {
                "batch": plain.batch,
                **{name: one._asdict() for name, one in by_name},
                "best": "plain" if best == plain.tokens_per_s else "static",
                "compact_over_best": round(compact.tokens_per_s / best, 4),
                "simulated": static.simulated,
            }
        )
    return rows


def read_prompts(path: Path, kind: str, model: Path) -> list[list[int]]:
    """Token ids of a file's prompts of one kind."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [tokenizer.encode(row["prompt"]).ids for row in rows if row.get("kind", kind) == kind]


def table_of(path: Path) -> SpsTable:
    """A table's file, or what a report has of one. Raises TableError."""
    table = json.loads(path.read_text()).get("sps")
    if table is None:
        return read_sps(str(path))
    if "bias_seconds" in table:
        return msgspec.convert(table, AdditiveTable)
    return msgspec.convert(table, StepTable)


def main() -> int:
    """Measure, print and write; 1 where compact falls behind ``--bar``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pycoder")
    parser.add_argument("--draft", help="the draft's folder; the embedded one if left out")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--simulate-survival", type=float, metavar="MEAN")
    parser.add_argument("--prompts", type=Path, help="a .jsonl file; random tokens if left out")
    parser.add_argument("--kind", default="completion")
    parser.add_argument("--batch-size", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--context", type=int, default=128, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sps-steps", type=int, default=16, help="steps of a cell of the table")
    parser.add_argument(
        "--sps", type=Path, help="a table that was measured before, or a report of this program"
    )
    parser.add_argument(
        "--policy",
        default="auto",
        choices=("auto", "fixed"),
        help="fixed: compact drafts at every step, so that the planner alone leaves drafts out",
    )
    parser.add_argument("--bar", type=float, default=0.98)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    folder = resolve_model(args.model)
    plain = EngineConfig(
        model=args.model, device=args.device, dtype=args.dtype, load_format=args.load_format
    )
    static = msgspec.structs.replace(
        plain,
        speculative_algorithm="DSPARK",
        speculative_draft_model_path=args.draft,
        speculative_length_policy="fixed",
    )
    source = find_draft(static, load_model_config(folder))
    assert source is not None
    gamma = source.shape.steps
    prompts = [] if args.prompts is None else read_prompts(args.prompts, args.kind, folder)
    load = Load(tuple(args.batch_size), prompts, args.context, args.steps, args.turns, gamma + 1)
    sweep = Sweep(max(load.batches), args.context, args.sps_steps)
    table: SpsTable
    if args.sps is None:
        cells, _ = measure_costs(static, sweep, gamma, bench_steps)
        table = fit_costs(cells, "additive")
        print(costs_text(cells, table), file=sys.stderr, flush=True)
    else:
        table = table_of(args.sps)
    static = msgspec.structs.replace(static, simulate_survival=args.simulate_survival)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "sps.json")
        path.write_bytes(msgspec.json.encode(table))
        compact = msgspec.structs.replace(
            static,
            speculative_ragged_verify_mode="compact",
            speculative_dspark_sps_table_path=str(path),
            speculative_length_policy=args.policy,
        )
        configs = {"plain": plain, "static": static, "compact": compact}
        rows = compare({name: apart(config, load) for name, config in configs.items()})
    worst = min(float(str(row["compact_over_best"])) for row in rows)
    report = {
        "command": "python benchmarks/bench_ragged.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "simulated": args.simulate_survival is not None,
        "simulate_survival": args.simulate_survival,
        "gamma": gamma,
        "context": args.context,
        "prompts": len(prompts),
        "steps": args.steps,
        "turns": args.turns,
        "policy": args.policy,
        "rows": rows,
        "worst": worst,
        "bar": args.bar,
        "sps_file": None if args.sps is None else args.sps.name,
        "sps": msgspec.to_builtins(table),
        "seconds": round(time.perf_counter() - began, 1),
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    mark = " (simulated: it says nothing of the models)" if report["simulated"] else ""
    for row in rows:
        speeds = ", ".join(f"{name} {row[name]['tokens_per_s']:.0f}" for name in configs)  # type: ignore[index]
        print(f"batch {row['batch']}: {speeds} tokens/s, {row['compact_over_best']}{mark}")
    return 0 if worst >= args.bar else 1


if __name__ == "__main__":
    sys.exit(main())
