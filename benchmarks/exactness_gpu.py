"""Speculation on a GPU must not change greedy output (docs/architecture.md, "Exactness").

float32 (O1): plain and NGRAM of every source at batch 1, 8 and 32, overlap on and off, against
plain at batch 1; a difference counts as a tie if the float64 gap of the two tokens' logits is below
1e-4. bfloat16 (O2): the largest gap between plain at batch 1 and plain at batch 32 bounds the gap
of every first divergence of NGRAM from plain at batch 1. The first 64 tokens of 20 prompts on the
GPU in float32 are those of the CPU.

    python benchmarks/exactness_gpu.py --json benchmarks/results/h200-exact.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
from exactness import (
    MAX_TIE_SHARE,
    Divergence,
    GapOf,
    Prompt,
    Speculation,
    config_of,
    divergences,
    float64_gap,
    load_prompts,
    run_config,
)

from outrider.engine_core.config import EngineConfig

Outputs = dict[str, list[int]]
Source = Literal["cpu", "gpu", "both"]
SHAPES = ((1, 1), (1, 0), (8, 1), (32, 1), (32, 0))  # batch, overlap
Case = tuple[Source | None, int, int]
CASES: tuple[Case, ...] = (
    *((None, *shape) for shape in SHAPES),  # plain decoding
    *(("cpu", *shape) for shape in SHAPES),
    *(("gpu", *shape) for shape in SHAPES[::2]),
    *(("both", *shape) for shape in SHAPES[::2]),
)
# One case of each kind.
FEW_CASES: tuple[Case, ...] = (
    (None, 1, 1), (None, 32, 1), ("cpu", 8, 1), ("gpu", 8, 1), ("both", 32, 1),
)  # fmt: skip


def gpu_config(
    source: Source | None, batch: int, overlap: int, dtype: Literal["float32", "bfloat16"]
) -> EngineConfig:
    row = {"batch": batch, "overlap": overlap, "page_size": 16, "chunk": 512}
    config = config_of(row, None if source is None else Speculation("NGRAM"))
    return msgspec.structs.replace(
        config, device="cuda", dtype=dtype, speculative_ngram_source=source or "cpu"
    )


def compare(
    prompts: Sequence[Prompt],
    dtype: Literal["float32", "bfloat16"],
    gap: GapOf,
    cases: Sequence[Case],
) -> tuple[list[dict[str, object]], Outputs, list[list[Divergence]]]:
    """Every case against the first: records, the reference, and the differences by case."""
    reference: Outputs = {}
    records, all_found = [], []
    for source, batch, overlap in cases:
        outputs, figures = run_config(gpu_config(source, batch, overlap, dtype), prompts)
        reference = reference or outputs
        found = divergences(prompts, reference, outputs, gap)
        all_found.append(found)
        record: dict[str, object] = {
            "algorithm": "NONE" if source is None else "NGRAM",
            "source": source,
            "batch": batch,
            "overlap": overlap,
            "tokens": sum(map(len, outputs.values())),
            "differences": len(found),
            "largest_gap": max((abs(d.gap) for d in found), default=0.0),
            **figures,
        }
        records.append(record)
        print(dtype, json.dumps(record), flush=True)
    return records, reference, all_found


def main() -> int:
    """Run both dtypes; exit status 1 when a difference is larger than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--few", action="store_true", help="one case of each kind")
    args = parser.parse_args()
    cases = FEW_CASES if args.few else CASES
    prompts = load_prompts(args.limit, args.max_tokens)
    gap = float64_gap()
    records, reference, found = compare(prompts, "float32", gap, cases)
    differences = [d for each in found for d in each]
    tokens = sum(int(str(record["tokens"])) for record in records)
    failures = [d._asdict() for d in differences if not d.tie]
    o1 = not failures and len(differences) <= MAX_TIE_SHARE * tokens
    few = [
        p._replace(max_tokens=min(64, p.max_tokens)) for p in prompts[:: len(prompts) // 20][:20]
    ]
    row = {"batch": 1, "overlap": 0, "page_size": 16, "chunk": 512}
    cpu, _ = run_config(config_of(row, None), few)
    against_cpu = divergences(few, {p.id: reference[p.id][: p.max_tokens] for p in few}, cpu, gap)
    wide, _, found = compare(prompts, "bfloat16", gap, cases)
    plain = [d for each, case in zip(found, cases, strict=True) if case[0] is None for d in each]
    spec = [d for each, case in zip(found, cases, strict=True) if case[0] for d in each]
    epsilon = max((abs(d.gap) for d in plain), default=0.0)
    beyond = [d._asdict() for d in spec if abs(d.gap) > epsilon]
    ok = o1 and not beyond and all(d.tie for d in against_cpu)
    report = {
        "command": "python benchmarks/exactness_gpu.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name(),
        "prompts": len(prompts),
        "float32": {"records": records, "ties": len(differences) - len(failures)},
        "float32_failures": failures,
        "against_cpu": {"prompts": len(few), "differences": [d._asdict() for d in against_cpu]},
        "bfloat16": {"records": wide, "epsilon": epsilon, "beyond_epsilon": beyond},
        "ok": ok,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: report[k] for k in ("float32_failures", "against_cpu", "ok")}))
    print(f"bfloat16: epsilon {epsilon:.4g}, {len(spec)} differ, {len(beyond)} beyond it")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
