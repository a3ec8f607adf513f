"""What a grammar costs a step: the same batches with a JSON schema on every row, and without.

    python benchmarks/bench_grammar_gpu.py --json benchmarks/results/h200-grammar-qwen3-8b.json

Two engines, one after the other; on each, batches with and without grammars take turns. Prompts
are random tokens; the model may be one of random weights, whose text is random and, under a
grammar, legal: every text of a timed turn is checked by a matcher of its own (``legal``). The
tokenizer is made (``wide_tokenizer.py``) unless the model's folder has one.

- ``plain``: no drafts. Rows write endless arrays of what the schemas of
  benchmarks/prompts/schema_prompts.jsonl say, row i of schema i mod 12.
- ``drafts``: steps that wait for the host's drafts as NGRAM's do, a chain of ``--drafts`` random
  tokens of letters for every row. Rows write endless arrays of strings, where letters are legal,
  so that nearly every node has a mask; hardly any draft is accepted.
- ``forced``: the same with the schemas of ``plain``, where what a grammar forces takes the drafts'
  place.

``over`` is the median step with grammars over that without, of the turns of a case together,
``over_turns`` that of each pair of turns. Of a step, by the device's clock: ``device_ms`` at work,
``gap_ms`` idle before it, ``mask_wait_ms`` idle in it until masks came; ``idle_share`` is that of
both in the time between two results. ``mask_ms`` is the host's time for a step's masks, of
``masks`` nodes, and ``nodes`` what a row verified. The file is written anew after every case.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from wide_tokenizer import letter_tokens, write_wide_tokenizer

from outrider.engine.build import build_worker
from outrider.engine.worker import EngineWorker, GraphWorker, counts_between
from outrider.engine_core.config import CoreConfig, EngineConfig, resolve_config
from outrider.engine_core.controller import LengthController
from outrider.engine_core.core import EngineCore
from outrider.engine_core.grammar_compiler import compiler_of
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.grammar_text import llguidance_grammar
from outrider.engine_core.host_drafter import HostProposal
from outrider.engine_core.ids import i32
from outrider.engine_core.memory_parts import OVERRUN_TOKENS
from outrider.engine_core.messages import CoreStats, GenerateRequest
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.refusal import Refused
from outrider.engine_core.sampling_params import SamplingParams
from outrider.engine_core.step_times import StepTimes

PROMPTS = Path(__file__).resolve().parent / "prompts" / "schema_prompts.jsonl"
STRINGS = {"type": "array", "minItems": 100_000, "items": {"type": "string"}}
WARM_UP, CHUNK, BAR = 8, 8192, 1.08
ABORTED = "aborted by the client"
SWITCH_INTERVAL_S = 100e-6  # as a core process has it
I32 = NDArray[np.int32]


class Case(NamedTuple):
    """Batches of one size; ``mode``: see the top."""

    mode: str
    batch: int
    temperature: float


@dataclass
class Side:
    """What was timed of a case with grammars, or without: a step's seconds, and sums."""

    walls: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    ended: int = 0
    texts: int = 0
    legal: int = 0

    def add(self, walls: list[float], sums: dict[str, float]) -> None:
        self.walls += walls
        self.turns.append(float(np.median(walls)))
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def report(self, batch: int) -> dict[str, object]:
        steps, total = len(self.walls), sum(self.walls)
        if not steps:
            return {"steps": 0, "ended": self.ended}
        a_step = {name: value / steps for name, value in self.sums.items()}
        idle = self.sums.get("gap_s", 0.0) + self.sums.get("mask_wait_s", 0.0)
        return {
            "steps": steps,
            "step_ms": round(float(np.median(self.walls)) * 1e3, 4),
            "p10_ms": round(float(np.percentile(self.walls, 10)) * 1e3, 4),
            "p90_ms": round(float(np.percentile(self.walls, 90)) * 1e3, 4),
            "max_ms": round(max(self.walls) * 1e3, 4),
            "mean_ms": round(total / steps * 1e3, 4),
            "turns_ms": [round(turn * 1e3, 4) for turn in self.turns],
            **{name[:-1] + "ms": round(a_step[name] * 1e3, 4) for name in a_step if _timed(name)},
            "idle_share": round(idle / total, 5) if "gap_s" in self.sums else None,
            "masks": round(a_step.get("masks", 0.0), 3),
            "nodes": round(1 + a_step["drafts"] / batch, 3),
            "emitted": round(a_step["emitted"] / batch, 3),
            "illegal": round(a_step["illegal"], 3),
            "forced": round(a_step["forced"], 3),
            "replay_share": round(a_step["replays"], 4) if "replays" in a_step else None,
            "tokens_per_s": round(self.sums["emitted"] / total, 1),
            "texts": self.texts,
            "legal": self.legal,
            "ended": self.ended,
        }


def _timed(name: str) -> bool:
    return name.endswith("_s")


class Letters:
    """A host drafter: chains of random tokens of letters, for every row."""

    def __init__(self, tokens: list[int], width: int) -> None:
        self._tokens = np.array(tokens, dtype=np.int32)
        self._width = width
        self._rng = np.random.default_rng(0)

    def open(self, slot: int, namespace: str, prompt: I32, learn: bool = True) -> None:
        """Nothing is learned."""

    def extend(self, slots: I32, cu: I32, tokens: I32) -> None:
        """Nothing is learned."""

    def close(self, slot: int) -> None:
        """Nothing is learned."""

    def flush(self) -> None:
        """Nothing is learned."""

    @property
    def node_count(self) -> int:
        """Nothing is learned."""
        return 0

    def propose(self, slots: I32, caps: I32) -> HostProposal:
        """Fresh chains."""
        rows = len(slots)
        chains = self._rng.choice(self._tokens, (rows, self._width))
        parents = np.broadcast_to(np.arange(self._width, dtype=np.int32), chains.shape)
        return HostProposal(
            np.minimum(caps, self._width).astype(np.int32),
            np.ascontiguousarray(chains),
            np.ascontiguousarray(parents),
            np.full(rows, 4, dtype=np.int32),
            np.full(chains.shape, 0.5, dtype=np.float32),
        )


class Bench:
    """An engine whose batches are timed; idle between them."""

    def __init__(self, config: EngineConfig, args: argparse.Namespace, tokenizer: Path) -> None:
        began = time.perf_counter()
        self._args = args
        self.worker: EngineWorker = build_worker(config)
        resolved = resolve_config(config, self.worker.info())
        if isinstance(resolved, Refused):
            raise SystemExit(f"{resolved.field}: {resolved.reason}")
        self.worker.prepare(resolved)
        self.core = self._core(resolved, tokenizer)
        self.build_s = time.perf_counter() - began
        info = self.worker.info()
        self.vocab_size, self.device, self.dtype = info.vocab_size, info.device, info.dtype
        self._checker = LLTokenizer(
            str(tokenizer), n_vocab=info.vocab_size, eos_token=sorted(info.eos_ids)
        )
        self._turn = 0

    def _core(self, resolved: CoreConfig, tokenizer: Path) -> EngineCore:
        drafter = controller = None
        if resolved.drafter is not None:
            width = resolved.draft_width - 1
            drafter = Letters(letter_tokens(tokenizer), width)
            times = StepTimes((1,), (1e-3,))  # of no use to the policy "fixed"
            controller = LengthController(times, resolved.worker.max_slots, width, "fixed")
        return EngineCore(
            resolved,
            self.worker,
            host_drafter=drafter,
            controller=controller,
            grammars=compiler_of(resolved),
            check=False,
        )

    def turn(self, case: Case, schemas: list[str] | None, steps: int, side: Side | None) -> None:
        """A batch from its prompts to its end; ``side`` None: only to warm up."""
        gc.collect()
        gc.freeze()  # as a core process does once it is up
        self._turn += 1
        specs = [
            None if schemas is None else GrammarSpec("json_schema", schemas[i % len(schemas)])
            for i in range(case.batch)
        ]
        texts: dict[str, list[bytes]] = {str(i): [] for i in range(case.batch)}
        self._enter(case, specs, texts, steps)
        core, worker = self.core, self.worker
        graphs = worker if isinstance(worker, GraphWorker) else None
        try:
            ended = self._steps(texts, WARM_UP)
            before, counts = core.stats(0), None if graphs is None else graphs.counts
            stamps, outputs = [time.perf_counter()], []
            for _ in range(steps):
                outputs.append(core.step())
                stamps.append(time.perf_counter())
            after = core.stats(0)
            ended += self._note(texts, outputs)
            if side is None:
                return
            side.ended += ended
            if ended or len(core.scheduler.batch.decoding) != case.batch:
                return  # not the batch that was to be timed
            sums = _sums(before, after)
            if counts is not None and graphs is not None:
                since = counts_between(counts, graphs)
                sums |= {
                    "gap_s": since.gap_ns * 1e-9,
                    "mask_wait_s": since.mask_wait_ns * 1e-9,
                    "mask_s": since.mask_ns * 1e-9,
                    "masks": since.mask_nodes,
                    "replays": since.replays,
                }
            side.add(np.diff(stamps).tolist(), sums)
        finally:
            self._end(case, texts)
        if schemas is not None:
            side.texts += case.batch
            side.legal += sum(
                self._legal(spec, texts[str(i)]) for i, spec in enumerate(specs) if spec is not None
            )

    def _enter(
        self,
        case: Case,
        specs: list[GrammarSpec | None],
        texts: dict[str, list[bytes]],
        steps: int,
    ) -> None:
        core, rng = self.core, np.random.default_rng((case.batch, self._turn))
        for i, spec in enumerate(specs):
            params = SamplingParams(
                temperature=case.temperature,
                seed=i,
                max_new_tokens=new_tokens(self._args, steps),
                ignore_eos=spec is None,
                grammar=spec,
            )
            prompt = rng.integers(8, self.vocab_size, self._args.context, dtype=np.int32)
            refused = core.submit(GenerateRequest(str(i), prompt.tobytes(), params))
            if refused is not None:
                raise RuntimeError(f"a request was refused: {refused.field}: {refused.reason}")
        for _ in range(2 * entry_steps(self._args)):
            batch = core.scheduler.batch
            if len(batch.decoding) == case.batch and not batch.prefilling:
                return
            if self._note(texts, [core.step()]):
                raise RuntimeError("a request ended while others entered")
        raise RuntimeError(f"{case.batch} requests did not come to decode together")

    def _steps(self, texts: dict[str, list[bytes]], count: int) -> int:
        return self._note(texts, [self.core.step() for _ in range(count)])

    def _note(self, texts: dict[str, list[bytes]], outputs: list[list]) -> int:  # type: ignore[type-arg]
        ended = 0
        for output in (one for some in outputs for one in some):
            texts[output.rid].append(output.tokens)
            if output.finish is not None:
                ended += 1
                if output.finish.message != ABORTED:
                    print(f"request {output.rid} ended: {output.finish}", file=sys.stderr)
        return ended

    def _end(self, case: Case, texts: dict[str, list[bytes]]) -> None:
        for i in range(case.batch):
            self.core.abort(str(i))
        while self.core.has_work:
            self._steps(texts, 1)
        refused = self.core.flush_cache()
        if refused is not None:
            raise RuntimeError(f"the engine did not become idle: {refused.reason}")

    def _legal(self, spec: GrammarSpec, parts: list[bytes]) -> bool:
        grammar = llguidance_grammar(spec)
        assert isinstance(grammar, str)
        tokens = i32(b"".join(parts)).tolist()
        matcher = LLMatcher(self._checker, grammar, log_level=0)
        return bool(tokens) and matcher.try_consume_tokens(tokens) == len(tokens)


def _sums(before: CoreStats, after: CoreStats) -> dict[str, float]:
    names = {
        "device_s": "worker_busy",
        "plan_s": "plan_cpu",
        "commit_s": "commit_cpu",
        "propose_s": "propose_cpu",
        "emitted": "generated_tokens",
        "drafts": "spec_draft_tokens",
        "illegal": "illegal_drafts",
        "forced": "forced_drafts",
    }
    return {name: getattr(after, of) - getattr(before, of) for name, of in names.items()}


def entry_steps(args: argparse.Namespace) -> int:
    """Most steps until the prompts of a batch are in."""
    batch: int = max(args.batch_size)
    return 8 + 2 * (-(-batch * int(args.context) // CHUNK)) + batch


def new_tokens(args: argparse.Namespace, steps: int) -> int:
    """So many that no request ends by its length, all drafts accepted."""
    return (WARM_UP + steps + entry_steps(args) + 4) * (1 + int(args.drafts))


def sized(args: argparse.Namespace, tokenizer: Path) -> EngineConfig:
    """The plain engine, with room for the largest batch."""
    tokens = args.context + new_tokens(args, args.steps) + OVERRUN_TOKENS
    batch = max(args.batch_size)
    return EngineConfig(
        model=args.model,
        tokenizer_path=str(tokenizer.parent),
        load_format=args.load_format,
        dtype=args.dtype,
        device=args.device,
        max_running_requests=batch,
        max_total_tokens=batch * (tokens + 64),
        chunked_prefill_size=CHUNK,
        num_threads=1 if args.device == "cpu" else None,
    )


def measure(bench: Bench, case: Case, schemas: list[str], out_of_time: float) -> dict[str, object]:
    """A row of the report: both sides in turns, as many as there is time for."""
    args, began = bench._args, time.perf_counter()
    sides = {"without": Side(), "with": Side()}
    given = {"without": None, "with": schemas}
    for name in sides:
        bench.turn(case, given[name], min(args.steps, args.warm_steps), None)
    warm_s = time.perf_counter() - began
    for turn in range(args.turns):
        if turn and time.perf_counter() > out_of_time:
            break
        order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        for name in order:
            bench.turn(case, given[name], args.steps, sides[name])
    row: dict[str, object] = {**case._asdict(), "context": args.context}
    without, with_ = sides["without"], sides["with"]
    if without.walls and with_.walls:
        over = float(np.median(with_.walls) / np.median(without.walls))
        pairs = zip(with_.turns, without.turns, strict=False)
        row |= {
            "over": round(over, 4),
            "over_turns": [round(a / b, 4) for a, b in pairs],
        }
        if case.mode != "forced":  # whose steps have other nodes
            row |= {"bar": BAR, "within": over <= BAR}
    reports = {name: side.report(case.batch) for name, side in sides.items()}
    return row | reports | {"warm_s": round(warm_s, 2)}


@contextmanager
def tokenizer_of(args: argparse.Namespace) -> Iterator[Path]:
    """The model's own tokenizer.json, or one that is made."""
    folder = resolve_model(args.model)
    if (folder / "tokenizer.json").is_file():
        yield folder / "tokenizer.json"
        return
    config = load_model_config(folder)
    with tempfile.TemporaryDirectory() as place:
        yield write_wide_tokenizer(Path(place), config.vocab_size, config.eos_token_ids[0])


def cases(mode: str, args: argparse.Namespace) -> Iterator[Case]:
    """Of one mode."""
    for batch in args.batch_size if mode != "forced" else [max(args.batch_size)]:
        for temperature in args.temperature if mode == "plain" else args.temperature[-1:]:
            yield Case(mode, batch, temperature)


def run(args: argparse.Namespace, report: dict[str, object], tokenizer: Path) -> None:
    """Every case, into ``report`` and the file."""
    began = time.perf_counter()
    rows: list[dict[str, object]] = []
    report["rows"] = rows
    lines = PROMPTS.read_text().splitlines()[::2]
    written = [
        json.dumps({"type": "array", "minItems": 100_000, "items": json.loads(line)["json_schema"]})
        for line in lines
    ]
    schemas = {"plain": written, "drafts": [json.dumps(STRINGS)], "forced": written}
    plain = sized(args, tokenizer)
    drafting = msgspec.structs.replace(
        plain,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=1 + args.drafts,
        speculative_length_policy="fixed",
    )
    engines = {"plain": (plain, ("plain",)), "drafts": (drafting, ("drafts", "forced"))}
    share = args.limit_s / len(engines)
    for number, (config, modes) in enumerate(engines.values()):
        wanted = [case for mode in modes if mode in args.mode for case in cases(mode, args)]
        if not wanted:
            continue
        wanted.sort(key=lambda case: -case.batch)  # the largest is what is asked about
        bench = Bench(config, args, tokenizer)
        report |= {"device_name": _device_name(bench.device), "dtype": bench.dtype}
        report.setdefault("build_s", [])
        report["build_s"].append(round(bench.build_s, 1))  # type: ignore[attr-defined]
        print(f"built in {bench.build_s:.1f} s", file=sys.stderr, flush=True)
        try:
            for case in wanted:
                limit = began + share * (number + 1)
                try:
                    rows.append(measure(bench, case, schemas[case.mode], limit))
                except Exception as error:
                    traceback.print_exc()
                    rows.append({**case._asdict(), "error": repr(error)})
                print(json.dumps(rows[-1]), flush=True)
                write(args, report, began)
                if "error" in rows[-1] and bench.core.has_work:
                    break  # the engine may not come back
        finally:
            bench.worker.shutdown()
            del bench
            gc.unfreeze()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    report["complete"] = True
    write(args, report, began)


def write(args: argparse.Namespace, report: dict[str, object], began: float) -> None:
    """The file, as far as it is."""
    report["seconds"] = round(time.perf_counter() - began, 1)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def main() -> int:
    """Measure, print and write; 1 where something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", default="benchmarks/configs/qwen3-8b")
    parser.add_argument("--load-format", default="dummy", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512, help="prompt tokens")
    parser.add_argument("--mode", nargs="+", default=["plain", "drafts", "forced"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--drafts", type=int, default=7, help="of a row, where drafts are made")
    parser.add_argument("--steps", type=int, default=48, help="timed steps of a turn")
    parser.add_argument("--warm-steps", type=int, default=32, help="of the turn before the first")
    parser.add_argument("--turns", type=int, default=3, help="of each side")
    parser.add_argument("--limit-s", type=float, default=140, help="fewer turns beyond that")
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    report: dict[str, object] = {
        "command": "python benchmarks/bench_grammar_gpu.py " + " ".join(sys.argv[1:]),
        "complete": False,
        "drafts": args.drafts,
    }
    with tokenizer_of(args) as tokenizer:
        run(args, report, tokenizer)
    rows = report["rows"]
    assert isinstance(rows, list)
    return 1 if any("error" in row or "over" not in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
