"""What a round of EAGLE3 or EAGLE costs on this CPU, part by part, beside a plain step.

    python benchmarks/bench_draft_round.py [--draft FOLDER] [--json FILE]

A round of S steps: the target over S + 1 tokens with their logits, the drafter's pass over what
was accepted, and S - 1 passes of its chain. Everything is measured with every instruction set of
this machine, in turns in one run, without the engine around it. ``floor_us``: the bytes of weights
and KV that the parts read, at the stream bandwidth measured in the same run. ``to_plain`` is the
accept length at which a round is as fast as plain steps. One thread.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_cpu_draft import pass_bytes
from bench_cpu_forward import PAGE_SIZE, make_batch

from outrider.engine.kv_pool import KVPool, bytes_per_token
from outrider.engine.models.cpu_arrays import InstructionSet
from outrider.engine.models.cpu_decoder import NativeDecoder
from outrider.engine.models.cpu_draft import NativeDraft
from outrider.engine.models.draft_loader import read_weights
from outrider.engine.models.draft_net import AcceptedRows, ChainRows, ChainState
from outrider.engine.weights import Checkpoint
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.ids import RowKind
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.model_path import resolve_model
from outrider.kernels.native_cpu import instruction_sets, measure_stream_bandwidth

STEPS = (2, 3, 4, 5, 6)
CPU = torch.device("cpu")


class Bench:
    """A target and its draft for one instruction set, over a context of some tokens."""

    def __init__(self, target: Path, draft: Path, context: int, isa: InstructionSet) -> None:
        config = load_model_config(target)
        self.target = NativeDecoder(Checkpoint(target), config, isa)
        found = load_draft_config(draft, config, "EAGLE3")
        self.net = NativeDraft(read_weights(draft, found), found, self.target, isa)
        pages = -(-(context + 16) // PAGE_SIZE)
        self.kv = KVPool(pages, PAGE_SIZE, config, torch.float32, CPU)
        self.draft_kv = KVPool(pages, PAGE_SIZE, found.model, torch.float32, CPU)
        for pool in (self.kv, self.draft_kv):
            pool.data.normal_()
        self.context, self.config = context, config
        self.alone = make_batch(1, 1, context)
        self.layers = found.feature_layers or ()
        table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
        lengths = torch.tensor([context], dtype=torch.int32)
        one = torch.ones(1, dtype=torch.int32)
        self.slot, self.lengths, self.table, self.one = one - 1, lengths, table, one

    def plain(self) -> None:
        """A step of plain decoding."""
        self.target.logits(self.target.forward(self.alone, self.kv))

    def parts(self, steps: int) -> dict[str, Callable[[], object]]:
        """The parts of a round."""
        batch, one = make_batch(1, steps + 1, self.context), self.one
        hidden, features = self.target.forward_capture(batch, self.kv, self.layers)
        hidden, features = hidden.clone(), features.clone()
        state = ChainState(torch.full((1, 1), 7), self.net.fuse(features)[:1].clone())
        nodes, cu = torch.zeros(2, steps + 1, dtype=torch.int32), one.new_tensor((0, steps + 1))
        rows = ChainRows(
            self.slot, one * steps, self.lengths, self.table, cu, nodes[0], nodes[1],
            one.clone(), one.clone(),
        )  # fmt: skip
        path = torch.arange(steps + 1, dtype=torch.int32)[None]
        prompts = one.new_zeros(1, 1)
        kinds = torch.full((1,), RowKind.VERIFY, dtype=torch.uint8)
        accepted = AcceptedRows(
            self.slot, kinds, self.lengths, one * (steps + 1), path, path, batch, features, prompts
        )
        return {
            "verify": lambda: self.target.forward_capture(batch, self.kv, self.layers),
            "logits": lambda: self.target.logits(hidden),
            "align": lambda: self.net.follow(accepted, state, self.draft_kv),
            "chain": lambda: self.net.draft(rows, state, self.draft_kv, steps),
        }

    def floors(self, bandwidth: float) -> tuple[float, float, float]:
        """Microseconds: the bytes of a plain step, a draft's pass and its fuse."""
        item = self.target.output_head.dtype.itemsize
        kv = self.context * bytes_per_token(self.config, torch.float32)
        draft_kv = self.context * bytes_per_token(self.net.config.model, torch.float32)
        fuse = self.net.config.feature_size * self.config.hidden_size * item
        sizes = (self.target.weight_bytes + kv, pass_bytes(self.net, item) + draft_kv, fuse)
        plain, one, fused = (size / bandwidth * 1e6 for size in sizes)
        return plain, one, fused


def microseconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e6


def measure(benches: dict[InstructionSet, Bench], budget: float) -> list[dict[str, object]]:
    """One line for each instruction set and number of steps; medians and minima."""
    work = {(isa, steps): bench.parts(steps) for isa, bench in benches.items() for steps in STEPS}
    times: dict[tuple[str, int, str], list[float]] = {}
    bandwidths: list[float] = []
    deadline = time.perf_counter() + budget
    while time.perf_counter() < deadline:
        bandwidths.append(
            measure_stream_bandwidth(next(iter(benches.values())).target.weight_bytes)
        )
        for (isa, steps), parts in work.items():
            for _ in range(3):
                plain = microseconds(benches[isa].plain)
                times.setdefault((isa, steps, "plain"), []).append(plain)
                for name, run in parts.items():
                    times.setdefault((isa, steps, name), []).append(microseconds(run))
    bandwidth = statistics.median(bandwidths)
    lines: list[dict[str, object]] = []
    for (isa, steps), parts in work.items():
        line: dict[str, object] = {"isa": isa, "steps": steps}
        for label, of in (("median", statistics.median), ("min", min)):
            spent = {name: of(times[isa, steps, name]) for name in ("plain", *parts)}
            whole = sum(spent.values()) - spent["plain"]
            line[label] = {**spent, "round": whole, "to_plain": whole / spent["plain"]}
        plain, one, fused = benches[isa].floors(bandwidth)
        line |= {"plain_floor_us": plain, "round_floor_us": plain + steps * one + fused}
        lines.append(line | {"stream_gb_s": bandwidth / 1e9})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pycoder")
    parser.add_argument("--draft", type=Path, default=Path("models/pycoder-11m-eagle3"))
    parser.add_argument("--context", type=int, default=320)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = resolve_model(arguments.model)
    benches: dict[InstructionSet, Bench] = {
        isa: Bench(target, arguments.draft, arguments.context, isa)
        for isa in instruction_sets()
        if isa != "base"
    }
    lines = measure(benches, arguments.seconds)
    for line in lines:
        best: dict[str, float] = line["min"]  # type: ignore[assignment]
        parts = ", ".join(
            f"{name} {best[name]:.0f}" for name in ("verify", "logits", "align", "chain")
        )
        print(
            f"{line['isa']:7} S = {line['steps']}: round {best['round']:6.0f} us ({parts}),"
            f" plain {best['plain']:5.0f}, ratio {best['to_plain']:.2f},"
            f" floor {line['round_floor_us']:.0f}"
        )
    if arguments.json:
        command = (
            "python benchmarks/bench_draft_round.py --json benchmarks/results/cpu-draft-round.json"
        )
        report = {
            "command": command,
            "model": arguments.model,
            "context": arguments.context,
            "threads": 1,
        }
        arguments.json.write_text(json.dumps({**report, "rounds": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
