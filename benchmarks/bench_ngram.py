"""CPU time of the n-gram drafter: one step's insert and look-up, with plain Python beside it."""

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider.engine_core.corpora import build_corpus
from outrider.engine_core.ngram import NgramConfig, NgramProposer

ROOT = Path(__file__).resolve().parent.parent
Tokens = NDArray[np.int32]


def read_text(tokens: int) -> Tokens:
    """Real text: the interpreter's own standard library through the embedded tokenizer."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models/pycoder-11m/tokenizer.json"))
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += tokenizer.encode(path.read_text(errors="replace"), add_special_tokens=False).ids
        if len(ids) >= tokens:
            return np.array(ids[:tokens], np.int32)
    raise SystemExit(f"the standard library has only {len(ids)} tokens, {tokens} are needed")


class PlainNode(dict[int, "PlainNode"]):
    """Children by token, the newest last."""


class PlainTrie:
    """What one would write first: nested dicts, every window walked again, newest child last."""

    def __init__(self, depth: int, nodes: int) -> None:
        self.depth, self.nodes = depth, nodes
        self.root = PlainNode()
        self.text: dict[int, list[int]] = {}

    def extend(self, slot: int, tokens: list[int]) -> None:
        text = self.text.setdefault(slot, [])
        for token in tokens:
            text.append(token)
            for start in range(max(0, len(text) - self.depth), len(text)):
                node = self.root
                for t in text[start:-1]:
                    node = node.setdefault(t, PlainNode())
                node[token] = node.pop(token, PlainNode())

    def extend_all(self, rows: list[list[int]]) -> None:
        for slot, tokens in enumerate(rows):
            self.extend(slot, tokens)

    def propose_all(self, rows: int) -> None:
        for slot in range(rows):
            self.propose(slot)

    def propose(self, slot: int) -> list[tuple[int, int]]:
        text = self.text[slot]
        found: list[tuple[int, int]] = []
        known: dict[tuple[int, int], int] = {}
        span, high = self.depth - 1, 10
        scale = (high - 1) / span
        for depth in range(min(len(text), span), 0, -1):
            node: PlainNode | None = self.root
            for t in text[-depth:]:
                node = node.get(t) if node is not None else None
            queue = [(0, node, (span - depth) * scale + 1)] if node else []
            for parent, string, breadth in queue:
                for token in list(reversed(string))[: max(1, int(breadth))]:
                    if (parent, token) not in known:
                        if len(found) == self.nodes:
                            return found
                        found.append((parent, token))
                        known[parent, token] = len(found)
                    queue.append((known[parent, token], string[token], breadth - scale))
        return found


def cpu_us(call: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1000


def rows_of(prompts: list[Tokens], step: int, accepted: Tokens) -> tuple[Tokens, Tokens]:
    """cu [R + 1] and tokens [T] of one step in which row r commits accepted[step, r] tokens."""
    counts = accepted[step]
    begins = accepted[:step].sum(axis=0)
    parts = [p[b : b + c] for p, b, c in zip(prompts, begins, counts, strict=True)]
    return np.cumsum([0, *counts]).astype(np.int32), np.concatenate(parts)


def measure_steps(
    proposer: NgramProposer, rows: list[Tokens], accepted: Tokens
) -> dict[str, float]:
    slots = np.arange(len(rows), dtype=np.int32)
    caps = np.full(len(rows), proposer.config.num_draft_tokens - 1, np.int32)
    insert, look_up, proposed = [], [], 0
    for step in range(len(accepted)):
        cu, tokens = rows_of(rows, step, accepted)
        insert.append(cpu_us(partial(proposer.extend, slots, cu, tokens)))
        look_up.append(cpu_us(partial(proposer.propose, slots, caps)))
        proposed += int(proposer.propose(slots, caps).counts.sum())
    both = np.add(insert, look_up)
    return {
        "insert_us": float(np.median(insert)),
        "look_up_us": float(np.median(look_up)),
        "both_us": float(np.median(both)),
        "both_p10_us": float(np.percentile(both, 10)),
        "both_p99_us": float(np.percentile(both, 99)),
        "tokens_per_step": float(accepted.sum() / len(accepted)),
        "proposed_per_row": proposed / accepted.size,
    }


def measure_plain(fill: Tokens, rows: list[Tokens], accepted: Tokens) -> dict[str, float]:
    plain = PlainTrie(18, 11)
    plain.extend(-1, fill.tolist())
    for slot, row in enumerate(rows):
        plain.extend(slot, row[:100].tolist())
    insert, look_up = [], []
    for step in range(min(10, len(accepted))):
        cu, tokens = rows_of(rows, step, accepted)
        parts = [tokens[cu[r] : cu[r + 1]].tolist() for r in range(len(rows))]
        insert.append(cpu_us(partial(plain.extend_all, parts)))
        look_up.append(cpu_us(partial(plain.propose_all, len(rows))))
    return {
        "insert_us": float(np.median(insert)),
        "look_up_us": float(np.median(look_up)),
        "both_us": float(np.median(np.add(insert, look_up))),
    }


def fill_to(proposer: NgramProposer, text: Tokens, nodes: int) -> tuple[int, float]:
    """Learns text until the trie has `nodes` nodes; tokens used and ns of CPU a token."""
    used, spent = 0, 0.0
    proposer.open(1000, "", text[:1])
    while proposer.trie.node_count < nodes and used < len(text):
        part = text[used : used + 1000]
        cu = np.array([0, len(part)], np.int32)
        slot = np.array([1000], np.int32)
        spent += cpu_us(partial(proposer.extend, slot, cu, part))
        used += len(part)
    proposer.close(1000)
    return used, spent * 1000 / max(1, used)


def run(arguments: argparse.Namespace) -> dict[str, object]:
    rng = np.random.default_rng(0)
    rows, steps = arguments.rows, arguments.steps
    per_row = 100 + 3 * steps
    text = read_text(arguments.fill_tokens + rows * per_row + 50_000)
    held_out, text = text[-rows * per_row :], text[: -rows * per_row]
    prompts = [held_out[r * per_row : (r + 1) * per_row] for r in range(rows)]
    accepted = rng.integers(1, 4, (steps, rows)).astype(np.int32)
    report: dict[str, object] = {"rows": rows, "steps": steps}
    used = 0
    cases: tuple[tuple[str, Literal["BFS", "PROB"], int], ...] = (
        ("BFS", "BFS", 10_000_000),
        ("PROB", "PROB", 10_000_000),
        ("BFS at capacity", "BFS", arguments.nodes),
    )
    for name, match_type, capacity in cases:
        proposer = NgramProposer(NgramConfig(match_type=match_type, capacity=capacity))
        used, ns = fill_to(proposer, text, arguments.nodes)
        for slot, prompt in enumerate(prompts):
            proposer.open(slot, "", prompt[:100])
        report[name] = {
            **measure_steps(proposer, [p[100:] for p in prompts], accepted),
            "nodes": proposer.trie.node_count,
            "evictions": proposer.trie.evictions,
            "memory_mib": proposer.trie.memory_bytes / 2**20,
            "prompt_ns_per_token": ns,
        }
    if not arguments.skip_plain:
        report["plain Python"] = measure_plain(text[:used], [p[100:] for p in prompts], accepted)
    report["corpus"] = measure_corpus(text[:100_000], prompts, accepted[: steps // 4])
    return report


def measure_corpus(text: Tokens, prompts: list[Tokens], accepted: Tokens) -> dict[str, float]:
    start = time.thread_time_ns()
    automaton = build_corpus([text])
    built = (time.thread_time_ns() - start) / len(text)
    proposer = NgramProposer(NgramConfig(external_sam_budget=4))
    proposer.corpora.install("library", automaton)
    for slot, prompt in enumerate(prompts):
        proposer.open(slot, "", prompt[:100])
    return {
        **measure_steps(proposer, [p[100:] for p in prompts], accepted),
        "build_ns_per_token": built,
        "bytes_per_token": automaton.memory_bytes / len(text),
        "states_per_token": automaton.states / len(text),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help="running requests")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=1_000_000, help="fill of the trie")
    parser.add_argument("--fill-tokens", type=int, default=150_000, help="text to fill it from")
    parser.add_argument("--skip-plain", action="store_true", help="leave the Python model out")
    parser.add_argument("--json", type=Path, help="also write the report here")
    arguments = parser.parse_args()
    report = run(arguments)
    command = "python benchmarks/bench_ngram.py " + " ".join(sys.argv[1:])
    text = json.dumps({"command": command, **report}, indent=2)
    sys.stdout.write(text + "\n")
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
