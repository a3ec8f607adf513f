"""Linear layers of few rows on an NVIDIA GPU: cuBLAS and the weight-streaming kernel.

The floor of a matmul is its weight's bytes over the copy bandwidth measured in the same run. Every
time is taken in CUDA graphs that walk through more weights than L2 holds. First each matmul of a
Qwen3-8B layer alone (cuBLAS for every M, then the configurations of a kernel: ``stream`` is for
Hopper, ``skinny`` for all others), then the chain of all layers with a norm, a stand-in for
attention and the activation between them, as one graph.

    python benchmarks/bench_linear_gpu.py --json benchmarks/results/h200-linear.json
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.linear_config import candidates, row_tier
from outrider.kernels.linear_gpu import (
    INTERLEAVE,
    LinearConfig,
    few_rows_linear,
    silu_mul_interleaved,
)
from outrider.kernels.split_workspace import SplitWorkspace
from outrider.kernels.stream_config import (
    WEIGHT_ROWS,
    StreamConfig,
    stream_shortlist,
    with_stages,
)

HIDDEN, QKV, FFN, VOCAB = 4096, 6144, 12288, 151936
SHAPES = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "head": (VOCAB, HIDDEN),
}
DTYPE = torch.bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Rows that choose the configuration of a tile of 16, 32, 64 and 128 rows.
TIERS = {16: 8, 32: 32, 64: 64, 128: 128}
GRAPH_BYTES = 1.6e9
COPY_BYTES, COPIES = 1 << 32, 20  # of the copy that bandwidth is measured by
Job = tuple[int, LinearConfig, str, bool]


@triton.jit
def _norm(x, other, out, stride, WIDTH: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = rms-normalised (x + other), one row a program: what stands between two matmuls."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, lanes = tl.program_id(0), tl.arange(0, WIDTH)
    value = tl.load(x + row * stride + lanes).to(tl.float32)
    if ADD:
        value += tl.load(other + row * WIDTH + lanes).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / WIDTH + 1e-6)
    tl.store(out + row * WIDTH + lanes, value.to(out.dtype.element_ty))


def norm(x: torch.Tensor, other: torch.Tensor | None, out: torch.Tensor, pdl: bool) -> None:
    """RMS norm of the first HIDDEN columns of x, plus ``other``."""
    launch = {"launch_pdl": True} if pdl else {}
    _norm[(x.shape[0],)](
        x, other, out, x.stride(0), WIDTH=HIDDEN, ADD=other is not None, PDL=pdl, num_warps=8,
        **launch,
    )  # fmt: skip


def tall_cuts(n: int, block_m: int, gated: bool, sms: int = 132) -> Iterator[StreamConfig]:
    """Tiles of every height in up to eight parts that keep most multiprocessors busy at once.

    A tile of t x 64 weight rows reads x once for its own bytes: of 128 rows that is as much again
    for t = 2 and half for t = 4. Its parts leave sums for each other, which are traffic, too.
    """
    blocks = -(-n // WEIGHT_ROWS)
    cuts = itertools.product((1, 2, 3, 4), (64, 128), range(1, 9), (4, 8))
    for tiles, block_k, split, warps in cuts:
        programs = -(-blocks // tiles) * split
        if tiles * block_m > 64 * warps or not 0.45 * sms <= programs <= sms:
            continue
        cut = with_stages(StreamConfig(tiles, block_k, 2, warps, split), block_m, gated)
        if cut is not None:
            yield cut


class Weights:
    """The weights of every layer and of the head, in one buffer."""

    def __init__(self, layers: int) -> None:
        sizes = {name: n * k for name, (n, k) in SHAPES.items()}
        layer = sum(size for name, size in sizes.items() if name != "head")
        self.buffer = torch.empty(layers * layer + 2 * sizes["head"], dtype=DTYPE, device="cuda")
        self.buffer.normal_(0.0, 0.02)
        self.of: dict[str, list[torch.Tensor]] = {name: [] for name in SHAPES}
        at = 0
        for names in [[name for name in SHAPES if name != "head"]] * layers + [["head"]] * 2:
            for name in names:
                self.of[name].append(self.buffer[at : at + sizes[name]].view(SHAPES[name]))
                at += sizes[name]

    def cycle(self, name: str) -> list[torch.Tensor]:
        """Weights of a shape, over and over, GRAPH_BYTES in all."""
        n, k = SHAPES[name]
        count = max(2, round(GRAPH_BYTES / (2 * n * k)))
        return [self.of[name][i % len(self.of[name])] for i in range(count)]


def graph_seconds(calls: Iterable[Callable[[], object]], replays: int = 5) -> float:
    """Median seconds of one replay of a graph of ``calls``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return float(statistics.median(times)) / 1e3


def copy_bandwidth(buffer: torch.Tensor) -> float:
    """Bytes read and written a second by a copy of half the buffer, at most COPY_BYTES."""
    count = min(buffer.numel() // 2, COPY_BYTES // buffer.element_size())
    source, target = buffer[:count], torch.empty_like(buffer[:count])
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(COPIES + 1)]
    for _ in range(2):  # the first turn brings the clocks up
        marks[0].record()
        for mark in marks[1:]:
            target.copy_(source)
            mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return float(2 * source.nbytes / (statistics.median(times) / 1e3))


def compile_job(job: Job) -> str:
    """Compile a kernel into Triton's cache by running it on a small matmul; the error, if any."""
    block_m, config, epilogue, pdl = job
    n, k = 512, config.block_k * 16
    x = torch.zeros(block_m, k, dtype=DTYPE, device="cuda")
    weight = torch.zeros(n, k, dtype=DTYPE, device="cuda")
    residual = torch.zeros(block_m, n, dtype=DTYPE, device="cuda")
    try:
        few_rows_linear(
            x, weight, config=config, pdl=pdl,
            residual=residual if epilogue == "residual" else None,
            silu_block=INTERLEAVE if epilogue == "silu" else 0,
        )  # fmt: skip
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


class Bench:
    """The measurements of one run and what they found so far."""

    def __init__(self, path: Path, layers: int, budget: float, pool: ProcessPoolExecutor) -> None:
        self._path, self._layers, self._pool = path, layers, pool
        self._deadline = time.perf_counter() + budget
        self._began = time.perf_counter()
        self._weights = Weights(layers)
        self._workspace = SplitWorkspace("cuda", 128 << 20, 1 << 16)
        self.bandwidth = copy_bandwidth(self._weights.buffer)
        self.cublas: dict[tuple[str, int], float] = {}
        self.best: dict[tuple[str, int], list[tuple[float, LinearConfig]]] = {}
        self.report: dict[str, object] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_tb_s": round(self.bandwidth / 1e12, 3),
        }
        self.say(f"copy bandwidth {self.bandwidth / 1e12:.2f} TB/s")

    def say(self, line: str) -> None:
        """Print with the seconds since the start."""
        print(f"[{time.perf_counter() - self._began:5.1f} s] {line}", flush=True)

    def save(self, name: str, value: object) -> None:
        """Add to the JSON file, which is complete after every part."""
        self.report[name] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.report, indent=1) + "\n")

    def row(self, name: str, seconds: float) -> dict[str, float]:
        """Microseconds and the ratio to the floor."""
        n, k = SHAPES[name]
        floor = 2 * n * k / self.bandwidth
        return {"us": round(seconds * 1e6, 2), "ratio": round(seconds / floor, 3)}

    def compile(self, jobs: Iterable[Job]) -> set[Job]:
        """Compile on all cores; the jobs that work, the others are printed."""
        wanted = sorted(set(jobs), key=repr)
        # split_k changes the kernel only by being more than one.
        kernels = {(m, self._kernel(c), e, p): None for m, c, e, p in wanted}
        errors = dict(zip(kernels, self._pool.map(compile_job, kernels), strict=True))
        for job, error in errors.items():
            if error:
                self.say(f"left out {job}: {error}")
        self.say(f"{len(kernels)} kernels compiled")
        return {job for job in wanted if not errors[(job[0], self._kernel(job[1]), *job[2:])]}

    @staticmethod
    def _kernel(config: LinearConfig) -> LinearConfig:
        if isinstance(config, StreamConfig):
            return replace(config, split=1, programs=0)
        return replace(config, split_k=min(config.split_k, 2))

    def measure_cublas(self) -> None:
        """F.linear for every shape and M."""
        table: dict[str, dict[int, dict[str, float]]] = {}
        for name in SHAPES:
            cycle = self._weights.cycle(name)
            for rows in ROWS:
                x = torch.randn(rows, SHAPES[name][1], dtype=DTYPE, device="cuda")
                F.linear(x, cycle[0])
                calls = [partial(F.linear, x, w) for w in cycle]
                self.cublas[name, rows] = graph_seconds(calls) / len(cycle)
                row = self.row(name, self.cublas[name, rows])
                table.setdefault(name, {})[rows] = row
            self.say(f"cublas {name}: { ({m: r['ratio'] for m, r in table[name].items()}) }")
        self.save("cublas", table)

    def time_config(self, name: str, rows: int, config: LinearConfig, pdl: bool = True) -> float:
        """Seconds of one matmul."""
        n, k = SHAPES[name]
        x = torch.randn(rows, k, dtype=DTYPE, device="cuda")
        out = x.new_empty(rows, n)

        def call(weight: torch.Tensor) -> None:
            few_rows_linear(
                x, weight, config=config, out=out, workspace=self._workspace, pdl=pdl
            )  # fmt: skip

        cycle = self._weights.cycle(name)
        call(cycle[0])
        return graph_seconds([partial(call, w) for w in cycle]) / len(cycle)

    def sweep(self, tiers: list[int], kernel: str, tall: bool) -> None:
        """Time the configurations of each tier, compiled all together."""
        plans: dict[tuple[int, str], list[LinearConfig]] = {}
        for tier, name in itertools.product(tiers, SHAPES):
            if kernel == "stream":
                gated = name == "gate_up"
                short = stream_shortlist(*SHAPES[name], tier, gated=gated)
                more = tall_cuts(SHAPES[name][0], tier, gated) if tall else ()
                plans[tier, name] = [*dict.fromkeys((*short, *more))]
            else:
                plans[tier, name] = [*candidates(*SHAPES[name], tier)]
        works = self.compile((t, c, "", True) for (t, _), found in plans.items() for c in found)
        table: dict[str, list[dict[str, object]]] = {}
        for (tier, name), found in plans.items():
            rows = TIERS[tier]
            times: list[tuple[float, LinearConfig]] = []
            for config in found:
                if time.perf_counter() > self._deadline:
                    self.say(f"out of time: {name} at {tier} has {len(times)} of {len(found)}")
                    break
                if (tier, config, "", True) in works:
                    times.append((self.time_config(name, rows, config), config))
            times.sort(key=lambda pair: pair[0])
            self.best[name, tier] = times[:5]
            table[f"{name} M<={tier}"] = [
                {**self.row(name, seconds), **asdict(config)} for seconds, config in times[:8]
            ]
            for seconds, config in times[:2]:
                self.say(f"{name} M={rows} {self.row(name, seconds)} {config}")
            self.save("sweep", table)

    def per_row_count(self, tiers: list[int]) -> None:
        """The chosen configuration at every M, with and without dependent launch, and its error."""
        jobs = [
            (tier, found[0][1], epilogue, pdl)
            for (name, tier), found in self.best.items()
            if found
            for epilogue in ("", {"gate_up": "silu", "qkv": "", "head": ""}.get(name, "residual"))
            for pdl in (False, True)
        ]
        self.compile(jobs)
        table: dict[str, dict[int, object]] = {}
        for (name, tier), found in self.best.items():
            if not found:
                continue
            for rows in [m for m in ROWS if m <= max(tiers) and row_tier(m) == tier]:
                config = found[0][1]
                table.setdefault(name, {})[rows] = {
                    "cublas": self.row(name, self.cublas[name, rows]),
                    "plain": self.row(name, self.time_config(name, rows, config, pdl=False)),
                    "pdl": self.row(name, self.time_config(name, rows, config)),
                    "error": self._error(name, rows, config),
                }
                self.say(f"{name} M={rows}: {table[name][rows]}")
        self.save("rows", table)

    def _error(self, name: str, rows: int, config: LinearConfig) -> float:
        """The largest difference from float32, relative to the largest output."""
        weight = self._weights.of[name][0]
        x = torch.randn(rows, weight.shape[1], dtype=DTYPE, device="cuda")
        out = few_rows_linear(x, weight, config=config, workspace=self._workspace, pdl=True).float()
        exact = x.float() @ weight.float().t()
        return round(float((out - exact).abs().max() / exact.abs().max()), 5)

    def chain(self) -> None:
        """The layers and the head as one graph, for each way to launch them."""
        weight_bytes = 2 * sum(
            n * k * (1 if name == "head" else self._layers) for name, (n, k) in SHAPES.items()
        )
        floor = weight_bytes / self.bandwidth
        table: dict[int, dict[str, object]] = {}
        for rows in (1, 8, 16, 32, 64, 128):
            chain = Chain(self._weights, rows, self._layers, self._workspace)
            configs = {
                name: self.best[name, row_tier(rows)][0][1]
                for name in SHAPES
                if self.best.get((name, row_tier(rows)))
            }
            faster = {
                name: config
                for name, config in configs.items()
                if self.best[name, row_tier(rows)][0][0] < self.cublas[name, rows]
            }
            ways: dict[str, Callable[[], None]] = {
                "cublas": partial(chain.run, {}, pdl=False, fused=False),
                "chosen": partial(chain.run, faster, pdl=False, fused=True),
                "chosen, dependent launch": partial(chain.run, faster, pdl=True, fused=True),
            }
            table[rows] = {"floor_ms": round(floor * 1e3, 3)}
            for way, run in ways.items():
                if time.perf_counter() > self._deadline + 30:
                    self.say("out of time for more chains")
                    return
                run()
                seconds = graph_seconds([run])
                table[rows][way] = {
                    "ms": round(seconds * 1e3, 3),
                    "ratio": round(seconds / floor, 3),
                }
                self.say(f"chain M={rows} {way}: {table[rows][way]}")
            self.save("chain", table)


class Chain:
    """A model's matmuls with norms, a stand-in for attention and the activation between them."""

    def __init__(self, weights: Weights, rows: int, layers: int, workspace: SplitWorkspace) -> None:
        self._weights, self._layers, self._workspace = weights, layers, workspace

        def empty(width: int) -> torch.Tensor:
            return torch.randn(rows, width, dtype=DTYPE, device="cuda")

        self._x, self._normed, self._qkv, self._mixed = (
            empty(HIDDEN), empty(HIDDEN), empty(QKV), empty(HIDDEN),
        )  # fmt: skip
        self._streams = [empty(HIDDEN), empty(HIDDEN)]
        self._gate_up, self._act, self._logits = empty(2 * FFN), empty(FFN), empty(VOCAB)

    def run(self, configs: dict[str, LinearConfig], pdl: bool, fused: bool) -> None:
        """All launches of one step; shapes without a configuration go to cuBLAS."""
        weights = self._weights.of
        a, b = self._streams

        def matmul(
            name: str, layer: int, x: torch.Tensor, out: torch.Tensor,
            residual: torch.Tensor | None = None, silu: int = 0,
        ) -> None:  # fmt: skip
            if name in configs:
                few_rows_linear(
                    x, weights[name][layer], config=configs[name], out=out, residual=residual,
                    silu_block=silu, workspace=self._workspace, pdl=pdl,
                )  # fmt: skip
            elif residual is not None:
                torch.addmm(residual, x, weights[name][layer].t(), out=out)
            else:
                torch.mm(x, weights[name][layer].t(), out=out)

        norm(self._x, None, a, pdl)
        for layer in range(self._layers):
            norm(a, None if fused or layer == 0 else b, self._normed, pdl)
            matmul("qkv", layer, self._normed, self._qkv)
            norm(self._qkv, None, self._mixed, pdl)
            matmul("o", layer, self._mixed, b, a if fused else None)
            norm(b, None if fused else a, self._normed, pdl)
            if fused and "gate_up" in configs:
                matmul("gate_up", layer, self._normed, self._act, silu=INTERLEAVE)
                act = self._act
            else:
                matmul("gate_up", layer, self._normed, self._gate_up)
                act = silu_mul_interleaved(self._gate_up, INTERLEAVE, pdl=pdl)
            matmul("down", layer, act, a, b if fused else None)
        norm(a, None, self._normed, pdl)
        matmul("head", 0, self._normed, self._logits)


def main() -> int:
    """Run all parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tiers", default="16,32,64,128")
    parser.add_argument("--kernel", choices=("stream", "skinny"), default="stream")
    parser.add_argument("--tall", action="store_true", help="sweep all tall tiles in parts, too")
    parser.add_argument("--budget", type=float, default=110.0, help="seconds for the sweep")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    args = parser.parse_args()
    tiers = [int(tier) for tier in args.tiers.split(",")]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        bench = Bench(args.json, args.layers, args.budget, pool)
        bench.measure_cublas()
        bench.sweep(tiers, args.kernel, args.tall)
        bench.per_row_count(tiers)
        bench.chain()
    bench.say(f"written to {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
