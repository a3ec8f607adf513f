"""Paged attention of a Qwen3-8B layer on an NVIDIA GPU: time, bytes and share of copy bandwidth.

Each time is the median of replays of one CUDA graph that walks over several layers' KV, together
larger than the L2 cache, divided by its calls. Splits are chosen for ``--max-kv`` tokens and not
for the context at hand, as in a server's graphs. ``--sweep`` tries tile shapes, warps, stages and
splits instead and prints the fastest of each case.

    python benchmarks/bench_attention_gpu.py --json benchmarks/results/h200-attention.json
    python benchmarks/bench_attention_gpu.py --sweep
"""

# mypy: disable-error-code="no-untyped-call"

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from outrider.engine.bench.rates import copy_rate
from outrider.kernels.paged_attention_gpu import Tiling, choose_tiling, paged_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP = HEADS // KV_HEADS
DTYPE = torch.bfloat16
KEY_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
BATCHES, QUERIES, CONTEXTS = (1, 8, 32, 64, 128), (1, 8), (576, 2048, 8192)
L2_BYTES, MOST_SETS = 200e6, 36
# (block_n, warps, stages) of streaming tiles; (block_m, block_n, warps, stages) of prefill's.
SHAPES = ((64, 4, 2), (64, 4, 3), (64, 4, 4), (32, 4, 4), (32, 4, 6), (128, 4, 2), (128, 8, 2))
PREFILL_SHAPES = (
    *((128, 64, 8, stages) for stages in (2, 3, 4)),
    *((128, 128, 8, stages) for stages in (2, 3)),
    (64, 64, 4, 2),
)
SWEPT = (
    *((batch, 1, 576) for batch in (1, 8, 32, 64, 128, 256)),
    *((batch, 1, 2048) for batch in (1, 32, 64)),
    *((batch, 8, 576) for batch in (1, 8)),
    (2, 8192, 8192),
)


class Inputs:
    """``batch`` rows of ``q`` queries at the end of ``context`` tokens, for several layers."""

    def __init__(self, batch: int, q: int, context: int, page_size: int, max_kv: int) -> None:
        pages = -(-context // page_size)
        self.batch, self.q, self.context, self.page_size = batch, q, context, page_size
        self.max_kv = max(max_kv, context)
        self.kv_bytes = batch * context * KEY_BYTES
        self.sets = max(2, min(MOST_SETS, int(L2_BYTES / self.kv_bytes) + 1))
        shape = (self.sets, 2, (batch * pages + 1) * page_size, KV_HEADS, HEAD_DIM)
        self.caches = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        self.query = torch.randn(batch * q, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        self.out = torch.empty_like(self.query)
        order = torch.randperm(batch * pages, device="cuda").int() + 1
        width = -(-self.max_kv // page_size)
        self.table = torch.zeros(batch, width, dtype=torch.int32, device="cuda")
        self.table[:, :pages] = order.view(batch, pages)
        self.slots = torch.arange(batch, device="cuda", dtype=torch.int32)
        self.positions = torch.arange(context - q, context, device="cuda").repeat(batch)
        self.cu_q = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * q
        self.kv_lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        self.bits = torch.zeros(batch * q, dtype=torch.int64, device="cuda")
        self.trees = torch.zeros(batch, dtype=torch.uint8, device="cuda")

    @property
    def moved(self) -> int:
        """Bytes a call must read and write."""
        return self.kv_bytes + 2 * self.query.numel() * 2

    @property
    def operations(self) -> float:
        """Multiplications and additions of the visible (query, key) pairs."""
        pairs = sum(range(self.context - self.q + 1, self.context + 1))
        return 4.0 * self.batch * pairs * HEADS * HEAD_DIM

    def call(self, layer: int, **options: Any) -> None:
        """Attention of one layer."""
        paged_attention(
            self.query,
            self.caches[layer, 0],
            self.caches[layer, 1],
            self.positions,
            self.cu_q,
            self.kv_lens,
            self.table,
            self.bits,
            self.trees,
            self.page_size,
            HEAD_DIM**-0.5,
            0,
            slots=self.slots,
            max_q=self.q,
            max_kv=self.max_kv,
            out=self.out,
            **options,
        )

    def tiling(self) -> Tiling:
        """What the function itself chooses."""
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        return choose_tiling(
            self.batch, KV_HEADS, self.q * GROUP, HEAD_DIM, 2, self.max_kv, multiprocessors
        )

    def microseconds(self, replays: int, **options: Any) -> float:
        """Of one call, over all layers in a graph of at least 16 calls."""
        rounds = -(-16 // self.sets) if self.q < 64 else 1

        def every_layer() -> None:
            for layer in list(range(self.sets)) * rounds:
                self.call(layer, **options)

        return graph_microseconds(every_layer, replays) / (self.sets * rounds)


def graph_microseconds(work: Callable[[], object], replays: int) -> float:
    """Median time of a replay of ``work`` as one graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times: list[float] = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return 1e3 * statistics.median(times)


def measured(inputs: Inputs, time: float, tiling: Tiling, bandwidth: float) -> dict[str, Any]:
    """One row of the report."""
    rate = inputs.moved / (time * 1e-6)
    row: dict[str, Any] = {
        "batch": inputs.batch,
        "q": inputs.q,
        "context": inputs.context,
        "us": round(time, 2),
        "bytes": inputs.moved,
        "GB/s": round(rate / 1e9, 1),
        "of_copy": round(rate / bandwidth, 3),
        "tiling": tiling._asdict(),
    }
    if inputs.q > 64:
        row["TFLOP/s"] = round(inputs.operations / time * 1e-6, 1)
    return row


def report(args: argparse.Namespace, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Every case with the tiling that the function chooses."""
    cases = [*itertools.product(BATCHES, QUERIES, CONTEXTS), (2, 8192, 8192)]
    for batch, q, context in cases:
        inputs = Inputs(batch, q, context, args.page_size, args.max_kv)
        time = inputs.microseconds(args.replays, pdl=args.pdl)
        yield measured(inputs, time, inputs.tiling(), bandwidth)


def sweep(args: argparse.Namespace, bandwidth: float) -> Iterator[dict[str, Any]]:
    """The chosen tiling of each case, then the fastest five of all tried."""
    for batch, q, context in SWEPT:
        inputs = Inputs(batch, q, context, args.page_size, args.max_kv)
        chosen = inputs.tiling()
        rows = []
        for tiling in (chosen, *candidates(inputs, chosen)):
            try:
                time = inputs.microseconds(args.replays, tiling=tiling, pdl=args.pdl)
            except OutOfResources:
                continue
            rows.append(measured(inputs, time, tiling, bandwidth))
        yield {"chosen": True, **rows[0]}
        yield from sorted(rows[1:], key=lambda row: float(row["us"]))[:5]


def candidates(inputs: Inputs, chosen: Tiling) -> list[Tiling]:
    """All shapes at the splits that give one or a few programs a multiprocessor."""
    if inputs.q > 64:
        return [Tiling(*shape, 1) for shape in PREFILL_SHAPES]
    shapes = [chosen._replace(block_n=n, warps=w, stages=s) for n, w, s in SHAPES]
    programs = inputs.batch * KV_HEADS
    useful = [count for count in (1, 2, 4, 8, 16, 32) if 64 <= programs * count <= 600]
    return [
        tiling
        for shape, count in itertools.product(shapes, useful or [1])
        if (tiling := shape._replace(splits=count)) != chosen
    ]


def main() -> int:
    """Print one JSON row a line, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-kv", type=int, default=16384)
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--pdl", action="store_true")
    args = parser.parse_args()
    bandwidth = copy_rate(torch.device("cuda"))
    print(json.dumps({"copy_GB/s": round(bandwidth / 1e9, 1)}), flush=True)
    rows = []
    for row in (sweep if args.sweep else report)(args, bandwidth):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.json:
        result = {
            "device": torch.cuda.get_device_name(),
            "command": " ".join(["python", *sys.argv]),
            "copy_GB/s": round(bandwidth / 1e9, 1),
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
