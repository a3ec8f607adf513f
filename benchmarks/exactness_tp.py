"""Ranks that share a model must not change greedy output (docs/tensor_parallel.md).

float32 (O1): plain and NGRAM over ``--tp-size`` ranks against plain on one device at batch 1; a
difference counts as a tie if the float64 gap of the two tokens' logits is below 1e-4. bfloat16
(O2, on GPUs): the largest gap between plain runs at batch 1 and others, on one device or over the
ranks, bounds the gap of every first divergence: of NGRAM from plain over the ranks, and of plain
over the ranks from plain on one device, both at batch 1
(docs/decisions/0009-how-far-rounding-goes.md).

    python benchmarks/exactness_tp.py --json benchmarks/results/h200-exact-tp2.json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from exactness import (
    MAX_TIE_SHARE,
    GapOf,
    Prompt,
    Speculation,
    config_of,
    divergences,
    float64_gap,
    load_prompts,
    run_config,
)
from exactness_gpu import ROUNDING, Record, Save
from msgspec.structs import asdict

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.divergence import Divergence

Dtype = Literal["float32", "bfloat16"]
Outputs = dict[str, list[int]]


class Case(NamedTuple):
    """One engine; ``ranks`` 1 or the number asked for."""

    ranks: int
    algorithm: str | None
    batch: int
    overlap: int


def cases(ranks: int) -> list[Case]:
    """The reference first."""
    return [
        Case(1, None, 1, 1),
        Case(1, None, 32, 1),
        Case(ranks, None, 1, 1),
        Case(ranks, None, 32, 0),
        Case(ranks, "NGRAM", 1, 1),
        Case(ranks, "NGRAM", 32, 1),
        Case(ranks, "NGRAM", 32, 0),
    ]


def rounding_cases() -> list[Case]:
    """Plain on one device, at batch sizes that show how far rounding goes."""
    return [Case(1, None, batch, 1) for batch in ROUNDING]


def engine_config(case: Case, device: Literal["cpu", "cuda"], dtype: Dtype) -> EngineConfig:
    row = {"batch": case.batch, "overlap": case.overlap, "page_size": 16, "chunk": 512}
    config = config_of(row, None if case.algorithm is None else Speculation(case.algorithm))
    return msgspec.structs.replace(config, device=device, dtype=dtype, tp_size=case.ranks)


def run_all(
    prompts: list[Prompt],
    ranks: int,
    device: Literal["cpu", "cuda"],
    dtype: Dtype,
    gap: GapOf,
    save: Save,
) -> tuple[list[Record], dict[Case, Outputs]]:
    """Outputs by case, and a record each with its differences from the reference."""
    outputs: dict[Case, Outputs] = {}
    records: list[Record] = []
    for case in [*cases(ranks), *(rounding_cases() if dtype == "bfloat16" else [])]:
        outputs[case], figures = run_config(engine_config(case, device, dtype), prompts)
        found = divergences(prompts, outputs[cases(ranks)[0]], outputs[case], gap)
        record: Record = {
            **case._asdict(),
            "tokens": sum(map(len, outputs[case].values())),
            "differences": len(found),
            "not_ties": sum(not d.tie for d in found),
            "largest_gap": max((abs(d.gap) for d in found), default=0.0),
            **figures,
        }
        records.append(record)
        print(dtype, json.dumps(record), flush=True)
        save(dtype, records)
    return records, outputs


def check_half(
    prompts: list[Prompt], ranks: int, outputs: dict[Case, Outputs], gap: GapOf
) -> dict[str, object]:
    """O2 over the ranks, and against one device."""

    def gaps(a: Case, b: Case) -> list[Divergence]:
        return divergences(prompts, outputs[a], outputs[b], gap)

    one, one_wide, plain, plain_wide, *drafted = cases(ranks)
    spread = gaps(one, one_wide) + gaps(plain, plain_wide)
    for case in rounding_cases():
        spread += gaps(one, case)
    epsilon = max((abs(d.gap) for d in spread), default=0.0)
    ngram = [d for case in drafted for d in gaps(plain, case)]
    moved = gaps(one, plain)
    return {
        "epsilon": epsilon,
        "plain_differences": len(spread),
        "ngram_from_plain": len(ngram),
        "ngram_beyond_epsilon": [asdict(d) for d in ngram if abs(d.gap) > epsilon],
        "ranks_from_one": len(moved),
        "ranks_beyond_epsilon": [asdict(d) for d in moved if abs(d.gap) > epsilon],
    }


def main() -> int:
    """Run the types that the device has; exit status 1 when a difference is not rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--limit", type=int, help="prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int)
    args = parser.parse_args()
    prompts = load_prompts(args.limit, args.max_tokens)
    gap = float64_gap()
    dtypes = args.dtypes or (["float32"] if args.device == "cpu" else ["float32", "bfloat16"])
    ok = True
    report: dict[str, object] = {
        "command": "python benchmarks/exactness_tp.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "ranks": args.tp_size,
        "prompts": len(prompts),
    }

    def save(dtype: str, records: list[Record]) -> None:
        so_far = report | {dtype: {"records": records}, "ok": None, "complete": False}
        args.json.write_text(json.dumps(so_far, indent=1) + "\n")

    for dtype in dtypes:
        records, outputs = run_all(prompts, args.tp_size, args.device, dtype, gap, save)
        half: dict[str, object] = {}
        if dtype == "float32":
            tokens = sum(int(str(record["tokens"])) for record in records)
            differences = sum(int(str(record["differences"])) for record in records)
            ok &= not any(record["not_ties"] for record in records)
            ok &= differences <= MAX_TIE_SHARE * tokens
        else:
            half = check_half(prompts, args.tp_size, outputs, gap)
            ok &= not half["ngram_beyond_epsilon"] and not half["ranks_beyond_epsilon"]
        report[dtype] = {"records": records, **half}
    report |= {"ok": ok, "complete": True}
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print("ok" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
