"""Speculation must not change a single greedy token (docs/architecture.md, "Exactness").

Every configuration of a pairwise covering array is run with speculation off, with NGRAM and with
each embedded draft model, as chains and as trees, or as blocks in every mode of ragged verify, and
compared with one reference: speculation off, one request at a time. A difference counts as a tie
only if the float64 gap of the two tokens' logits, computed by transformers, is below 1e-4.

    python benchmarks/exactness.py --json benchmarks/results/exact-cpu.json

``--only EAGLE EAGLE3`` runs some algorithms alone (NONE: speculation off).
"""

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
from msgspec.structs import asdict

from outrider.engine.build import build_engine
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.core import EngineCore
from outrider.engine_core.divergence import Divergence, first_divergence
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import GenerateRequest
from outrider.engine_core.ragged_verify import RaggedMode
from outrider.engine_core.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "benchmarks" / "prompts" / "pycoder_prompts.jsonl"
MAX_TIE_SHARE = 1e-4

FACTORS: dict[str, tuple[int, ...]] = {
    "batch": (1, 8, 32),
    "overlap": (1, 0),
    "page_size": (1, 16, 64),
    "chunk": (64, 512),
}


class Prompt(NamedTuple):
    """A benchmark prompt: its id, token ids and number of tokens to generate."""

    id: str
    tokens: list[int]
    max_tokens: int


def covering_array(factors: dict[str, tuple[int, ...]]) -> list[dict[str, int]]:
    """Rows such that every pair of values of two factors occurs together (greedy, ordered)."""
    names = list(factors)

    def pairs(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    rows = list(itertools.product(*factors.values()))
    missing = set().union(*(pairs(row) for row in rows))
    chosen: list[dict[str, int]] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        chosen.append(dict(zip(names, best, strict=True)))
    return chosen


def load_prompts(limit: int | None = None, max_tokens: int | None = None) -> list[Prompt]:
    """The benchmark prompts, tokenized; an even spread over the file when limited."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "pycoder-11m" / "tokenizer.json"))
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    if limit is not None:
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    return [
        Prompt(
            row["id"],
            tokenizer.encode(row["prompt"]).ids,
            min(row["max_tokens"], max_tokens or row["max_tokens"]),
        )
        for row in rows
    ]


class Speculation(NamedTuple):
    """An algorithm, and how a draft model drafts: steps, branches, nodes with the bonus token.

    ``mode``: of ragged verify, where it is not static. Confidence then shares out DEAR.
    """

    algorithm: str
    shape: tuple[int, int, int] | None = None
    mode: RaggedMode = "static"

    @property
    def name(self) -> str:
        """What records call it."""
        name = self.algorithm if self.shape is None else f"{self.algorithm}-topk{self.shape[1]}"
        return name if self.mode == "static" else f"{name}-{self.mode}"


CHAIN, TREE = (5, 1, 6), (5, 4, 16)
# An SPS table with which many drafts are not worth their verification, at every batch size.
DEAR = ROOT / "benchmarks" / "configs" / "dear-drafts.sps.json"
Case = tuple[dict[str, int], Speculation | None]


def embedded(algorithm: str) -> bool:
    """Whether there is a draft of the embedded model for an algorithm."""
    return (ROOT / "models" / f"pycoder-11m-{algorithm.lower()}" / "config.json").is_file()


def blocks() -> list[Speculation]:
    """The block drafts that are embedded, DSPARK's in every mode of ragged verify."""
    found = [Speculation("DFLASH")] if embedded("DFLASH") else []
    if embedded("DSPARK"):
        found += [Speculation("DSPARK", None, mode) for mode in get_args(RaggedMode)]
    return found


def speculations() -> list[Speculation | None]:
    """None, NGRAM, and every draft model that is embedded: chain and tree, or blocks."""
    found: list[Speculation | None] = [None, Speculation("NGRAM")]
    for algorithm in ("STANDALONE", "EAGLE", "EAGLE3"):
        if embedded(algorithm):
            found += [Speculation(algorithm, shape) for shape in (CHAIN, TREE)]
    return [*found, *blocks()]


def algorithm_of(speculation: Speculation | None) -> str:
    """Its algorithm; NONE with speculation off."""
    return "NONE" if speculation is None else speculation.algorithm


def config_of(row: dict[str, int], speculation: Speculation | None) -> EngineConfig:
    """The engine configuration of one row of the covering array."""
    steps, topk, nodes = (None, None, None)
    if speculation is not None and speculation.shape is not None:
        steps, topk, nodes = speculation.shape
    mode = None if speculation is None or speculation.mode == "static" else speculation.mode
    return EngineConfig(
        model="pycoder",
        page_size=row["page_size"],
        chunked_prefill_size=row["chunk"],
        max_running_requests=row["batch"],
        disable_overlap_schedule=not row["overlap"],
        max_total_tokens=65536,
        num_threads=1,
        device="cpu",
        speculative_algorithm=None if speculation is None else speculation.algorithm,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        speculative_length_policy="auto" if speculation is None else "fixed",
        speculative_ragged_verify_mode=mode,
        speculative_dspark_sps_table_path=None if mode is None else str(DEAR),
    )


def run_core(core: EngineCore, prompts: Sequence[Prompt], aborts: int = 0) -> dict[str, list[int]]:
    """Greedy outputs by prompt id; everything is submitted at once.

    ``aborts``: so many requests more, ahead of the others and of the first prompts' text; one is
    aborted every third step.
    """
    outputs: dict[str, list[int]] = {prompt.id: [] for prompt in prompts}
    doomed = [prompt._replace(id=f"{prompt.id} aborted") for prompt in prompts[:aborts]]
    for prompt in (*doomed, *prompts):
        params = SamplingParams(temperature=0.0, max_new_tokens=prompt.max_tokens, ignore_eos=True)
        tokens = np.asarray(prompt.tokens, dtype=np.int32).tobytes()
        refused = core.submit(GenerateRequest(prompt.id, tokens, params))
        if refused is not None:
            raise RuntimeError(f"{prompt.id}: {refused}")
    left = [prompt.id for prompt in doomed]
    turn = 0
    while core.has_work:
        turn += 1
        if left and turn % 3 == 0:
            core.abort(left.pop(0))
        for output in core.step():
            if output.rid not in outputs:
                continue
            outputs[output.rid].extend(i32(output.tokens).tolist())
            if output.finish is not None and output.finish.kind == "abort":
                raise RuntimeError(f"{output.rid}: {output.finish.message}")
    return outputs


GapOf = Callable[[Sequence[int], int, int], float]


def float64_gap() -> GapOf:
    """A function giving logit(a) - logit(b) after a prefix, in float64, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        ROOT / "models" / "pycoder-11m", dtype=torch.float64
    )

    @functools.cache
    def known(prefix: tuple[int, ...], a: int, b: int) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([list(prefix)])).logits[0, -1]
        return float(logits[a] - logits[b])

    # Configurations that differ from the reference mostly do so at the same places.
    return lambda prefix, a, b: known(tuple(prefix), a, b)


def divergences(
    prompts: Sequence[Prompt],
    reference: dict[str, list[int]],
    outputs: dict[str, list[int]],
    gap: GapOf,
) -> list[Divergence]:
    """The first difference of each output, with the float64 gap of the two tokens."""
    each = (_divergence(p, reference[p.id], outputs[p.id], gap) for p in prompts)
    return [divergence for divergence in each if divergence is not None]


def _divergence(prompt: Prompt, want: list[int], got: list[int], gap: GapOf) -> Divergence | None:
    return first_divergence(
        prompt.id, want, got, lambda at, a, b: gap(prompt.tokens + want[:at], a, b)
    )


def transformers_greedy(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Greedy outputs of transformers' own generate in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        ROOT / "models" / "pycoder-11m", dtype=torch.float32
    )
    model.generation_config.eos_token_id = None
    out = {}
    for prompt in prompts:
        ids = torch.tensor([prompt.tokens])
        with torch.inference_mode():
            full = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=prompt.max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        out[prompt.id] = full[0, len(prompt.tokens) :].tolist()
    return out


def run_config(
    config: EngineConfig, prompts: Sequence[Prompt]
) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Outputs of one engine and its accept length."""
    (outputs,), figures = run_passes(config, prompts, 1)
    return outputs, figures


def run_passes(
    config: EngineConfig, prompts: Sequence[Prompt], passes: int, aborts: int = 0
) -> tuple[list[dict[str, list[int]]], dict[str, float]]:
    """Outputs of each pass over the prompts by one engine, and figures of all of them.

    Passes after the first find the prompts in the radix cache; ``aborts``: see run_core. Raises
    RuntimeError if a page was lost.
    """
    began = time.perf_counter()
    engine = build_engine(config)
    try:
        start = time.perf_counter()
        outputs = [run_core(engine.core, prompts, aborts) for _ in range(passes)]
        seconds = time.perf_counter() - start
        stats = engine.core.stats(0)
        if stats.free_pages + stats.cached_pages != stats.total_pages:
            raise RuntimeError(f"pages were lost: {stats}")
        drafts = max(stats.spec_drafts, 1)
        return outputs, {
            "build_seconds": round(start - began, 2),
            "seconds": round(seconds, 2),
            "verify_steps": stats.spec_drafts,
            "drafts_verified": stats.spec_draft_tokens,
            "budget_steps": stats.verify_budget_steps,
            "trimmed_drafts": stats.verify_trimmed_drafts,
            "accept_length": round(stats.spec_verify_tokens / drafts, 4),
            "cached_tokens": stats.cached_tokens,
            "aborts": stats.aborts,
        }
    finally:
        engine.shutdown()


def all_cases() -> list[Case]:
    """Every row of the covering array with every speculation."""
    return [(row, some) for row in covering_array(FACTORS) for some in speculations()]


def short_cases() -> list[Case]:
    """Every row plainly, with NGRAM and with one of the draft models' speculations in turn."""
    cases: list[Case] = []
    plain, ngram, *models = speculations()
    for i, row in enumerate(covering_array(FACTORS)):
        cases += [(row, plain), (row, ngram)]
        cases += [(row, models[i % len(models)])] if models else []
    return cases


def matrix(
    prompts: Sequence[Prompt], gap: GapOf, jobs: int = 1, cases: Sequence[Case] | None = None
) -> Iterator[dict[str, object]]:
    """Run ``cases``, by default all; yields the reference, then a record for each of them."""
    base = {"batch": 1, "overlap": 0, "page_size": 16, "chunk": 512}
    reference, _ = run_config(config_of(base, None), prompts)
    yield {
        "reference": base,
        "tokens": sum(map(len, reference.values())),
        "outputs": reference,
    }
    cases = all_cases() if cases is None else cases
    configs = [config_of(row, some) for row, some in cases]
    for (row, speculation), (outputs, figures) in zip(
        cases, _run_all(configs, prompts, jobs), strict=True
    ):
        found = divergences(prompts, reference, outputs, gap)
        yield {
            "config": row,
            "algorithm": "NONE" if speculation is None else speculation.name,
            "tokens": sum(map(len, outputs.values())),
            "differences": [asdict(d) for d in found],
            "ties": sum(d.tie for d in found),
            "failures": sum(not d.tie for d in found),
            **figures,
        }


def _run_all(
    configs: Sequence[EngineConfig], prompts: Sequence[Prompt], jobs: int
) -> Iterator[tuple[dict[str, list[int]], dict[str, float]]]:
    if jobs == 1:
        yield from (run_config(config, prompts) for config in configs)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_config, configs, itertools.repeat(prompts))


def main() -> int:
    """Run the full matrix; exit status 1 when an output differs beyond ties."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="configurations at a time")
    parser.add_argument(
        "--short", action="store_true", help="draft models in turn, not all of them for every row"
    )
    parser.add_argument(
        "--only", nargs="+", choices=sorted({algorithm_of(s) for s in speculations()})
    )
    args = parser.parse_args()
    prompts = load_prompts(args.limit, args.max_tokens)
    gap = float64_gap()
    records: list[dict[str, object]] = []
    reference: dict[str, list[int]] = {}
    cases = short_cases() if args.short else all_cases()
    cases = [case for case in cases if not args.only or algorithm_of(case[1]) in args.only]
    for record in matrix(prompts, gap, args.jobs, cases):
        if "reference" in record:
            reference = record.pop("outputs")  # type: ignore[assignment]
            records.append(record)
            continue
        records.append(record)
        print(json.dumps({k: v for k, v in record.items() if k != "differences"}), flush=True)
    few = prompts[:: max(1, len(prompts) // 20)][:20]
    found = divergences(few, reference, transformers_greedy(few), gap)
    failures = sum(int(str(r.get("failures", 0))) for r in records) + sum(not d.tie for d in found)
    ties = sum(int(str(r.get("ties", 0))) for r in records)
    tokens = sum(int(str(r["tokens"])) for r in records)
    report = {
        "command": "python benchmarks/exactness.py " + " ".join(sys.argv[1:]),
        "prompts": len(prompts),
        "tokens_compared": tokens,
        "failures": failures,
        "ties": ties,
        "transformers": {
            "prompts": len(few),
            "differences": [asdict(d) for d in found],
            "failures": sum(not d.tie for d in found),
        },
        "records": records,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    ok = failures == 0 and ties <= MAX_TIE_SHARE * tokens
    print(f"{tokens} tokens, {ties} ties, {failures} failures: {'ok' if ok else 'FAILED'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
