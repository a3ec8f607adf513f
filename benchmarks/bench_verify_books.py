"""What planning verify lengths costs the host: CPU time of a step by mode, on a CPU.

    python benchmarks/bench_verify_books.py --sps sps.json --json verify-books-cpu.json

The embedded model and its DSPARK draft decode on a CPU and draft in full at every step, in mode
static and in mode compact, with an SPS table of ``outrider profile sps`` (or the ``sps`` of a
report of bench_ragged.py). Each engine has a process of its own; they take turns.
``plan_us`` and ``commit_us`` are CPU microseconds a step by ``core.stats``, medians of ten steps
each; ``over_static_us``: what both are above static's, beside the most that they may be.
``--before``: another checkout, built, whose compact mode takes turns with this one's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from bench_ragged import Load, read_prompts

from outrider.engine.build import build_engine
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.sampling_params import SamplingParams

BARS = {1: 60.0, 8: 60.0, 32: 120.0}  # microseconds above static
HERE = Path(__file__).resolve().parents[1]
PROMPTS = HERE / "benchmarks" / "prompts" / "pycoder_prompts.jsonl"
WARM_UP, WINDOW = 20, 10


def measure(mode: str, sps: str, batch: int, windows: int) -> tuple[list[float], list[float]]:
    """Microseconds a step of planning and of committing, by windows of steps."""
    prompts = read_prompts(PROMPTS, "completion", resolve_model("pycoder"))
    load = Load((batch,), prompts, 128, WINDOW * windows + WARM_UP, 1, 8)
    config = EngineConfig(
        model="pycoder",
        device="cpu",
        speculative_algorithm="DSPARK",
        speculative_length_policy="fixed",
        speculative_ragged_verify_mode="static" if mode == "static" else "compact",
        speculative_dspark_sps_table_path=None if mode == "static" else sps,
    )
    engine = build_engine(load.sized(config))
    core = engine.core
    params = SamplingParams(temperature=0.0, max_new_tokens=load.new_tokens(), ignore_eos=True)
    plans, commits = [], []
    try:
        for index in range(batch):
            tokens = np.array(prompts[index % len(prompts)][-load.context :], np.int32)
            core.submit(GenerateRequest(str(index), tokens.tobytes(), params, stream=False))
        for _ in range(WARM_UP):
            core.step()
        for _ in range(windows):
            before = core.stats(0)
            for _ in range(WINDOW):
                core.step()
            after = core.stats(0)
            steps = after.steps - before.steps
            plans.append((after.plan_cpu - before.plan_cpu) / steps * 1e6)
            commits.append((after.commit_cpu - before.commit_cpu) / steps * 1e6)
    finally:
        engine.shutdown()
    return plans, commits


def apart(checkout: Path, args: list[str]) -> tuple[list[float], list[float]]:
    """``measure`` in a process of its own, with the package of ``checkout``."""
    path = os.pathsep.join((str(checkout / "src"), str(HERE / "benchmarks")))
    done = subprocess.run(
        [sys.executable, __file__, "--one", *args],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    plans, commits = json.loads(done.stdout.splitlines()[-1])
    return plans, commits


def compare(
    checkouts: dict[str, Path], sps: str, batch: int, windows: int, turns: int
) -> dict[str, object]:
    """A row of the report: medians by mode, and what is above static."""
    plans: dict[str, list[float]] = {name: [] for name in checkouts}
    commits: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(turns):
        for name, checkout in checkouts.items():
            some = apart(checkout, [name, sps, str(batch), str(windows)])
            plans[name] += some[0]
            commits[name] += some[1]
    row: dict[str, object] = {"batch": batch, "bar_us": BARS.get(batch)}
    static = 0.0
    for name in checkouts:
        plan, commit = statistics.median(plans[name]), statistics.median(commits[name])
        found = {"plan_us": round(plan, 1), "commit_us": round(commit, 1)}
        if name == "static":
            static = plan + commit
        else:
            found["over_static_us"] = round(plan + commit - static, 1)
        row[name] = found
    return row


def main() -> int:
    """Measure, print and write; 1 where compact is above its bar."""
    if sys.argv[1:2] == ["--one"]:
        mode, sps, batch, windows = sys.argv[2:6]
        print(json.dumps(measure(mode, sps, int(batch), int(windows))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sps", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--batch-size", type=int, nargs="+", default=list(BARS))
    parser.add_argument("--windows", type=int, default=6, help="of ten steps, a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    checkouts = {"static": HERE, "compact": HERE}
    if args.before is not None:
        checkouts["compact_before"] = args.before.resolve()
    table = json.loads(args.sps.read_text())
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "sps.json")
        path.write_text(json.dumps(table.get("sps", table)))
        rows = []
        for batch in args.batch_size:
            rows.append(compare(checkouts, str(path), batch, args.windows, args.turns))
            print(json.dumps(rows[-1]), flush=True)
    report = {
        "command": "python benchmarks/bench_verify_books.py " + " ".join(sys.argv[1:]),
        "device": "CPU",
        "steps": WINDOW * args.windows * args.turns,
        "rows": rows,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    over = [row["compact"]["over_static_us"] for row in rows if row["bar_us"]]  # type: ignore[index]
    bars = [row["bar_us"] for row in rows if row["bar_us"]]
    return int(any(found > bar for found, bar in zip(over, bars, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
