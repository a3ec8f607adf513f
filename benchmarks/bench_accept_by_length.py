"""Accept length by the length of the prompt: does a draft lose its way behind long ones?

    python benchmarks/bench_accept_by_length.py --draft EAGLE3 --draft DFLASH \
        --json benchmarks/results/accept-by-length.json

Greedy, in float32 on a CPU, drafts at fixed length (``--steps`` for those that draft step by step).
A round counts its accepted drafts and the target's token behind them. ``--draft ALGORITHM=FOLDER``
takes another draft than the embedded one.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from outrider import LLM

PROMPTS = Path(__file__).parent / "prompts" / "pycoder_prompts.jsonl"
BOUNDS = (0, 128, 256, 384, 512, 8192)


def count(meta: Mapping[str, object], key: str) -> int:
    """One of the counters of a result."""
    value = meta[key]
    assert isinstance(value, int)
    return value


def by_length(
    algorithm: str, folder: str | None, rows: list[dict[str, str]], steps: int
) -> list[dict[str, object]]:
    """Of each range of prompt tokens and of all."""
    flags: dict[str, object] = {} if folder is None else {"speculative_draft_model_path": folder}
    if algorithm not in ("DFLASH", "DSPARK"):
        flags["speculative_num_steps"] = steps
    llm = LLM(
        "pycoder", device="cpu", dtype="float32", num_threads=1, max_running_requests=8,
        speculative_algorithm=algorithm, speculative_length_policy="fixed", **flags,
    )  # fmt: skip
    params = [{"temperature": 0.0, "max_new_tokens": row["max_tokens"]} for row in rows]
    try:
        metas = [found.meta_info for found in llm.generate([row["prompt"] for row in rows], params)]
    finally:
        llm.shutdown()
    made: list[dict[str, object]] = []
    for first, end in [*pairwise(BOUNDS), (0, BOUNDS[-1])]:
        some = [meta for meta in metas if first <= count(meta, "prompt_tokens") < end]
        rounds = sum(count(meta, "spec_verify_ct") for meta in some)
        accepted = sum(count(meta, "spec_num_correct_drafts") for meta in some)
        made.append(
            {
                "prompt_tokens": [first, end],
                "prompts": len(some),
                "rounds": rounds,
                "accept_length": round(1 + accepted / rounds, 4) if rounds else None,
            }
        )
    return made


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", action="append", required=True, metavar="ALGORITHM[=FOLDER]")
    parser.add_argument("--kind", default="completion")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == args.kind]
    report: dict[str, object] = {
        "command": "python benchmarks/bench_accept_by_length.py " + " ".join(sys.argv[1:]),
        "prompts": len(rows),
    }
    for draft in args.draft:
        algorithm, _, folder = draft.partition("=")
        report[draft] = by_length(algorithm, folder or None, rows, args.steps)
        print(draft, json.dumps(report[draft]), flush=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
