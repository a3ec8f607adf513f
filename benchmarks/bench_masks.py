"""What a step's masks cost the host: a batch of JSON schemas, node by node and in several threads.

    python benchmarks/bench_masks.py --json benchmarks/results/grammar-masks-cpu.json

Rows write arrays of what the schemas of benchmarks/prompts/schema_prompts.jsonl say, each
somewhere in a random text; its next tokens are its drafts. 151,936 tokens (``wide_tokenizer.py``).
``by_node``: each node is walked by a copy and has its mask made alone, in one thread; ``threads``:
``SlotGrammars.masks``, with as many. All take turns; ``wall_ms`` and ``cpu_ms`` are medians, and
``least_ms`` the shortest: on a machine with other work that is what is left of threads. ``schemas``
1: all rows have the same one.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher
from wide_tokenizer import write_wide_tokenizer

from outrider.engine.sampling.slot_grammars import RowTokens, SlotGrammars
from outrider.engine_core.available_cores import available_cores
from outrider.engine_core.grammar_compiler import GrammarCompiler
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.grammar_walk import legal_nodes
from outrider.engine_core.ids import RowKind
from outrider.engine_core.plan import SlotInit, StepPlan
from outrider.engine_core.sampling_params import SamplingParams

PROMPTS = Path(__file__).resolve().parent / "prompts" / "schema_prompts.jsonl"
VOCAB, EOS, DRAFTS = 151_936, 151_645, 7


class Row(NamedTuple):
    """A request's grammar, its text so far, and what it writes next."""

    spec: GrammarSpec
    text: list[int]
    drafts: list[int]


def write_row(compiler: GrammarCompiler, spec: GrammarSpec, length: int, seed: int) -> Row:
    """A random text of the grammar."""
    chosen, matcher = random.Random(seed), compiler.matcher(spec)
    mask = np.empty(compiler.mask_words, dtype=np.int32)
    text: list[int] = []
    while len(text) < length + DRAFTS:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        text.append(int(chosen.choice(allowed.tolist())))
        matcher.consume_token(text[-1])
    return Row(spec, text[:length], text[length:])


def by_node(matchers: list[LLMatcher], rows: list[Row], drafts: int, words: int) -> None:
    """Every node's mask, one after the other."""
    parents = list(range(-1, drafts))
    for matcher, row in zip(matchers, rows, strict=True):
        masks = np.empty((1 + drafts, words), dtype=np.int32)
        masks[1:] = -1
        matcher.unsafe_compute_mask_ptr(masks[0].ctypes.data, masks[0].nbytes)
        tokens = [-1, *row.drafts[:drafts]]
        for node, behind in legal_nodes(matcher, tokens, parents, frozenset((EOS,))):
            if behind is not None:
                behind.unsafe_compute_mask_ptr(masks[node].ctypes.data, masks[node].nbytes)


def enter(compiler: GrammarCompiler, rows: list[Row]) -> SlotGrammars:
    """Row r in slot r + 1."""
    made = SlotGrammars(compiler)
    inits = []
    for slot, row in enumerate(rows, 1):
        output = np.array(row.text, dtype=np.int32).tobytes()
        params = SamplingParams(grammar=row.spec)
        inits.append(SlotInit(slot, slot, params, 0, bytes(4), output, 0, (EOS,)))
    made.enter(StepPlan(1, False, b"", b"", b"", b"", b"", tuple(inits), b"", b"", b""))
    return made


def step_of(rows: list[Row], drafts: int) -> RowTokens:
    """The rows' query tokens, all of them nodes."""
    cu = np.arange(1 + len(rows), dtype=np.int32) * (1 + drafts)
    tokens = np.array([t for row in rows for t in (-1, *row.drafts[:drafts])], dtype=np.int32)
    return RowTokens(cu[:-1], cu[1:], cu[:-1], cu[1:], tokens, None)


def automata(compiler: GrammarCompiler, rows: list[Row]) -> int:
    """Wait until the grammars of open requests have all that the compiler makes for them."""
    for row in rows:
        compiler.hold(row.spec)
    deadline = time.monotonic() + 60
    wanted: dict[GrammarSpec, int] = {}
    for row in rows:
        wanted[row.spec] = min(wanted.get(row.spec, 0) + 1, compiler.mask_threads.count)
    while True:
        found = {
            s: len({compiler.begin(s).automaton for _ in range(2 * n)}) for s, n in wanted.items()
        }
        if found == wanted or time.monotonic() > deadline:
            return sum(found.values())
        time.sleep(0.01)


def measure(
    tokenizer: Path, specs: list[GrammarSpec], batch: int, drafts: int, args: argparse.Namespace
) -> dict[str, object]:
    """All ways in turns."""
    reader = GrammarCompiler(tokenizer, VOCAB, (EOS,))
    chosen = random.Random(batch)
    rows = [
        write_row(reader, specs[i % len(specs)], chosen.randrange(5, 60), i) for i in range(batch)
    ]
    ways: dict[str, Callable[[], object]] = {}
    made: dict[str, int] = {}
    # A copy that has made a mask knows it: every turn has fresh ones.
    fresh: dict[str, Callable[[], None]] = {}
    state: dict[str, object] = {}

    def plain() -> None:
        state["by_node"] = [_after(reader, row) for row in rows]

    fresh["by_node"] = plain
    ways["by_node"] = lambda: by_node(state["by_node"], rows, drafts, reader.mask_words)  # type: ignore[arg-type]
    slots, kinds = np.arange(1, 1 + batch, dtype=np.int32), bytes([RowKind.VERIFY]) * batch
    step = step_of(rows, drafts)
    for count in args.threads:
        compiler, name = GrammarCompiler(tokenizer, VOCAB, (EOS,), count), f"threads_{count}"
        made[name] = automata(compiler, rows)

        def renew(name: str = name, compiler: GrammarCompiler = compiler) -> None:
            state[name] = enter(compiler, rows)

        def work(name: str = name) -> object:
            grammars = state[name]
            assert isinstance(grammars, SlotGrammars)
            return grammars.masks(slots, kinds, step)

        fresh[name], ways[name] = renew, work
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(args.turns + 2):
        for name, way in ways.items():
            fresh[name]()
            cpu, began = time.process_time(), time.perf_counter()
            way()
            took = time.perf_counter() - began, time.process_time() - cpu
            if turn >= 2:  # automata grow while they are new
                times[name].append(took)
    return {
        "batch": batch,
        "drafts": drafts,
        "schemas": len(specs),
        **{
            name: {
                "wall_ms": _ms(statistics.median(wall for wall, _ in some)),
                "least_ms": _ms(min(wall for wall, _ in some)),
                "cpu_ms": _ms(statistics.median(cpu for _, cpu in some)),
                **({"automata": made[name]} if name in made else {}),
            }
            for name, some in times.items()
        },
    }


def _after(compiler: GrammarCompiler, row: Row) -> LLMatcher:
    matcher = compiler.matcher(row.spec)
    matcher.consume_tokens(row.text)
    return matcher


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", help="1, 2, 4, ... up to the cores")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32])
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    cores = available_cores()
    args.threads = args.threads or [count for count in (1, 2, 4, 8) if count <= cores]
    specs = [
        GrammarSpec(
            "json_schema",
            json.dumps(
                {"type": "array", "minItems": 1000, "items": json.loads(line)["json_schema"]}
            ),
        )
        for line in PROMPTS.read_text().splitlines()[::2]
    ]
    report: dict[str, object] = {
        "command": "python benchmarks/bench_masks.py " + " ".join(sys.argv[1:]),
        "vocabulary": VOCAB,
        "cores": cores,
        "load": round(os.getloadavg()[0], 2),
    }
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as place:
        tokenizer = write_wide_tokenizer(Path(place), VOCAB, EOS)
        for batch in args.batch_size:
            for some in (specs, specs[:1]):
                for drafts in (0, DRAFTS):
                    rows.append(measure(tokenizer, some, batch, drafts, args))
                    print(json.dumps(rows[-1]), flush=True)
                    args.json.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
