"""Speculation on a GPU must not change greedy output (docs/architecture.md, "Exactness").

Plain decoding, NGRAM of every source, a chain and a tree of every embedded draft, and block drafts
in every mode of ragged verify are compared with plain decoding at batch 1. float32 (O1): a
difference counts as a tie if the float64 gap of the two tokens' logits is below 1e-4. bfloat16
(O2): the gap of every first divergence of speculation from plain at batch 1 is at most the largest
of plain decoding's own, between batch 1 and others (docs/decisions/0009-how-far-rounding-goes.md;
what batch 32 alone would allow is reported too). The first 64 tokens of 20 prompts on the GPU in
float32 are those of the CPU.

``--only`` splits it into runs that have the reference in common: plain builds 5 engines a dtype
(and one on the CPU), ngram 13, drafts 15, blocks 12; with ``--few`` 2, 5, 8 and 6; in bfloat16 7
more.
``--device cpu`` tries it out,
in float32.

    python benchmarks/exactness_gpu.py --only drafts --json h200-exact-drafts.json
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from exactness import (
    CHAIN,
    MAX_TIE_SHARE,
    TREE,
    GapOf,
    Prompt,
    Speculation,
    blocks,
    config_of,
    divergences,
    float64_gap,
    load_prompts,
    run_config,
    run_passes,
)
from msgspec.structs import asdict

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.divergence import Divergence

Outputs = dict[str, list[int]]
Record = dict[str, object]
# Keeps the records of a dtype so far, so that a run that is ended early leaves what it has seen.
Save = Callable[[str, list[Record]], None]
Source = Literal["cpu", "gpu", "both"]
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
PARTS = ("plain", "ngram", "drafts", "blocks")
ABORTS = 8


class Case(NamedTuple):
    """An engine. ``again``: a second pass finds its prompts in the radix cache, and in both passes
    requests are aborted. ``few``: whether it stands for its kind.
    """

    speculation: Speculation | None
    batch: int
    overlap: int
    source: Source = "cpu"
    page_size: int = 16
    again: bool = False
    few: bool = False


PLAIN, WIDE = Case(None, 1, 1, few=True), Case(None, 32, 1, few=True)
# Batch sizes whose plain decoding shows how far rounding goes, beside those of PLAIN and WIDE; in a
# second pass, too, where speculation has one: a prompt's end is then computed with other tokens.
ROUNDING = (2, 4, 8, 16, 24, 48, 64)
NGRAM = Speculation("NGRAM")
ONE_STEP, BUSHY = (1, 1, 2), (4, 8, 24)  # shapes at the ends: steps 1, and topk 8


def cases_of(part: str) -> list[Case]:
    """The part's cases beside ``PLAIN`` and ``WIDE``."""
    if part == "plain":
        return [Case(None, 1, 0), Case(None, 8, 1), Case(None, 32, 0)]
    if part == "ngram":
        return [
            *(Case(NGRAM, *shape) for shape in ((1, 1), (1, 0), (32, 1), (32, 0))),
            Case(NGRAM, 8, 1, few=True),
            Case(NGRAM, 1, 1, "gpu"),
            Case(NGRAM, 8, 1, "gpu", few=True),
            Case(NGRAM, 32, 0, "gpu"),
            Case(NGRAM, 1, 1, "both"),
            Case(NGRAM, 8, 1, "both"),
            Case(NGRAM, 32, 0, "both", few=True),
        ]
    if part == "blocks":
        return [case for some in blocks() for case in _block_cases(some)]
    cases = []
    for algorithm in ("STANDALONE", "EAGLE", "EAGLE3"):
        chain, tree = Speculation(algorithm, CHAIN), Speculation(algorithm, TREE)
        cases += [
            Case(chain, 8, 1, again=True, few=True),
            Case(tree, 32, 1, few=True),
            Case(tree, 8, 0, page_size=1, again=True),
        ]
    return [
        *cases,
        Case(Speculation("EAGLE3", CHAIN), 1, 1),
        Case(Speculation("EAGLE3", ONE_STEP), 32, 1),
        Case(Speculation("EAGLE", BUSHY), 8, 1, page_size=1),
        Case(Speculation("STANDALONE", ONE_STEP), 8, 0),
    ]


def _block_cases(block: Speculation) -> list[Case]:
    """Modes have batch 1, 8 and 32 between them; each has a second pass and aborts."""
    if block.mode == "static":
        return [
            Case(block, 8, 1, again=True, few=True),
            Case(block, 1, 1),
            Case(block, 32, 0, page_size=1),
        ]
    return [
        Case(block, 8, 1, again=True, few=True),
        Case(block, 32, 1),
        Case(block, 1 if block.mode == "compact" else 32, 0, page_size=1),
    ]


def chosen_cases(parts: Sequence[str], few: bool, device: Device) -> list[Case]:
    """The cases of some parts, the reference first; a CPU has NGRAM's one source alone."""
    cases = [PLAIN, WIDE, *(case for part in parts for case in cases_of(part))]
    return [
        case
        for case in cases
        if (case.few or not few) and (device == "cuda" or case.source == "cpu")
    ]


def engine_config(case: Case, device: Device, dtype: Dtype) -> EngineConfig:
    """The engine of a case."""
    row = {
        "batch": case.batch, "overlap": case.overlap, "page_size": case.page_size, "chunk": 512,
    }  # fmt: skip
    config = config_of(row, case.speculation)
    return msgspec.structs.replace(
        config, device=device, dtype=dtype, speculative_ngram_source=case.source
    )


def compare(
    prompts: Sequence[Prompt],
    device: Device,
    dtype: Dtype,
    gap: GapOf,
    cases: Sequence[Case],
    save: Save,
) -> tuple[list[Record], Outputs, list[list[Divergence]]]:
    """Every case against the first: records, the reference, and the differences by case."""
    reference: Outputs = {}
    records: list[Record] = []
    all_found = []
    for case in cases:
        passes, aborts = (2, ABORTS) if case.again else (1, 0)
        outputs, figures = run_passes(engine_config(case, device, dtype), prompts, passes, aborts)
        reference = reference or outputs[0]
        found = [d for each in outputs for d in divergences(prompts, reference, each, gap)]
        all_found.append(found)
        some = case.speculation
        record: Record = {
            "algorithm": "NONE" if some is None else some.algorithm,
            "shape": None if some is None else some.shape,
            "mode": None if some is None else some.mode,
            "source": case.source if some is NGRAM else None,
            "batch": case.batch,
            "overlap": case.overlap,
            "page_size": case.page_size,
            "passes": passes,
            "tokens": sum(len(tokens) for each in outputs for tokens in each.values()),
            "differences": len(found),
            "largest_gap": max((abs(d.gap) for d in found), default=0.0),
            **figures,
        }
        records.append(record)
        print(dtype, json.dumps(record), flush=True)
        save(dtype, records)
    return records, reference, all_found


def check_single(
    prompts: Sequence[Prompt],
    device: Device,
    gap: GapOf,
    cases: Sequence[Case],
    on_cpu: bool,
    save: Save,
) -> tuple[dict[str, object], bool]:
    """O1, and with ``on_cpu`` that the CPU agrees: what is reported, and whether it holds."""
    records, reference, found = compare(prompts, device, "float32", gap, cases, save)
    differences = [d for each in found for d in each]
    tokens = sum(int(str(record["tokens"])) for record in records)
    failures = [asdict(d) for d in differences if not d.tie]
    ties = len(differences) - len(failures)
    report: dict[str, object] = {
        "float32": {"records": records, "ties": ties},
        "float32_failures": failures,
    }
    ok = not failures and ties <= MAX_TIE_SHARE * tokens
    if on_cpu:
        few = [
            p._replace(max_tokens=min(64, p.max_tokens))
            for p in prompts[:: max(1, len(prompts) // 20)][:20]
        ]
        cpu, _ = run_config(engine_config(Case(None, 1, 0), "cpu", "float32"), few)
        cut = {p.id: reference[p.id][: p.max_tokens] for p in few}
        differing = divergences(few, cut, cpu, gap)
        report["against_cpu"] = {
            "prompts": len(few),
            "differences": [asdict(d) for d in differing],
        }
        ok = ok and all(d.tie for d in differing)
    return report, ok


def check_half(
    prompts: Sequence[Prompt], device: Device, gap: GapOf, cases: Sequence[Case], save: Save
) -> tuple[dict[str, object], bool]:
    """O2: what is reported, and whether it holds."""
    again = any(case.again for case in cases)
    cases = [*cases, *(Case(None, batch, 1, again=again) for batch in ROUNDING)]
    records, _, found = compare(prompts, device, "bfloat16", gap, cases, save)
    pairs = list(zip(cases, found, strict=True))
    plain = [(case.batch, d) for case, each in pairs if case.speculation is None for d in each]
    drafted = [d for case, each in pairs if case.speculation is not None for d in each]
    epsilon = max((abs(d.gap) for _, d in plain), default=0.0)
    of_32 = max((abs(d.gap) for batch, d in plain if batch == 32), default=0.0)
    beyond = [asdict(d) for d in drafted if abs(d.gap) > epsilon]
    beyond_32 = [asdict(d) for d in drafted if abs(d.gap) > of_32]
    print(
        f"bfloat16: plain decoding differs {len(plain)} times, epsilon {epsilon:.4g} ({of_32:.4g} "
        f"at batch 32); speculation {len(drafted)} times, {len(beyond)} ({len(beyond_32)}) beyond"
    )
    report = {
        "records": records,
        "plain_differences": len(plain),
        "drafted_differences": len(drafted),
        "epsilon": epsilon,
        "beyond_epsilon": beyond,
        "epsilon_batch_32": of_32,
        "beyond_epsilon_batch_32": beyond_32,
    }
    return {"bfloat16": report}, not beyond


def main() -> int:
    """Run the types that the device has; exit status 1 when a difference is not rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--few", action="store_true", help="one case of each kind")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    dtypes = args.dtypes or (["float32"] if args.device == "cpu" else ["float32", "bfloat16"])
    if args.device == "cpu" and "bfloat16" in dtypes:
        parser.error("--dtypes: a CPU computes in float32 alone")
    cases = chosen_cases(args.only, args.few, args.device)
    prompts = load_prompts(args.limit, args.max_tokens)
    gap = float64_gap()
    report: dict[str, object] = {
        "command": "python benchmarks/exactness_gpu.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "prompts": len(prompts),
        "engines": len(cases) * len(dtypes) + len(ROUNDING) * ("bfloat16" in dtypes),
    }
    ok = True

    def save(dtype: str, records: list[Record]) -> None:
        so_far = report | {dtype: {"records": records}, "ok": None, "complete": False}
        args.json.write_text(json.dumps(so_far, indent=1) + "\n")

    if "float32" in dtypes:
        on_cpu = args.device == "cuda" and "plain" in args.only
        found, good = check_single(prompts, args.device, gap, cases, on_cpu, save)
        report, ok = report | found, ok and good
    if "bfloat16" in dtypes:
        found, good = check_half(prompts, args.device, gap, cases, save)
        report, ok = report | found, ok and good
    report |= {"ok": ok, "complete": True}
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: report.get(k) for k in ("float32_failures", "against_cpu", "ok")}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
