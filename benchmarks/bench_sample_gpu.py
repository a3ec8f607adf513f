"""Sampling over a vocabulary of 151,936 on an NVIDIA GPU: time a graph replay, tokens that differ.

    python benchmarks/bench_sample_gpu.py > h200-sample.json

A time is the median replay, by events, of a graph of one ``coupled_sample``; the floor is one
read of the logits at the copy bandwidth measured in the same run. Logits: ``zipf`` falls with the
logarithm of the rank, as a language model's do; ``normal`` is flat, top-p keeps 93,000 tokens.
``differ`` counts tokens unlike those of the float64 torch reference. ``seconds`` is the whole run.

Nearly all of a run on a fresh machine is compiling: eight kernels for each type and number of rows.
Processes of their own do it side by side and leave it in Triton's cache.
"""

# mypy: disable-error-code="no-untyped-call"

import argparse
import functools
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable

import torch

from outrider.engine.bench.rates import copy_rate
from outrider.engine.dependent_launch import launches_dependents
from outrider.kernels.coupled_sample import coupled_sample as reference
from outrider.kernels.coupled_sample_gpu import coupled_sample

VOCAB, ROWS = 151_936, (1, 8, 64, 512)
COMPARED = 64  # rows of a batch that is compared with the reference
DEVICE = "cuda"
# top_k, top_p, min_p of every row
FILTERS = {
    "none": (-1, 1.0, 0.0),
    "top_k": (50, 1.0, 0.0),
    "top_p": (-1, 0.9, 0.0),
    "all": (50, 0.9, 0.05),
}


def replay_us(call: Callable[[], object], replays: int) -> float:
    """Median microseconds of a captured call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * replays)]
    for begin, end in zip(marks[::2], marks[1::2], strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [b.elapsed_time(e) for b, e in zip(marks[::2], marks[1::2], strict=True)]
    return float(statistics.median(times)) * 1e3


def make_logits(shape: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
    if shape == "normal":
        return torch.randn(rows, VOCAB, device=DEVICE).to(dtype)
    ranks = torch.rand(rows, VOCAB, device=DEVICE).argsort(dim=1)
    return (20.0 - 1.5 * torch.log1p(ranks.float())).to(dtype)


def make_columns(rows: int, filters: tuple[int, float, float]) -> list[torch.Tensor]:
    top_k, top_p, min_p = filters
    return [
        torch.full((rows,), 0.8, device=DEVICE),
        torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
        torch.full((rows,), top_p, device=DEVICE),
        torch.full((rows,), min_p, device=DEVICE),
        torch.randint(2**62, (rows,), device=DEVICE),
        torch.randint(8192, (rows,), device=DEVICE),
    ]


def sampler(
    logits: torch.Tensor, columns: list[torch.Tensor], name: str
) -> Callable[[], torch.Tensor]:
    """A draw as the engine launches it."""
    pdl = launches_dependents(logits.device)
    return functools.partial(coupled_sample, logits, *columns, filtered=name != "none", pdl=pdl)


def compile_for(rows: int, dtype: torch.dtype) -> None:
    """Compile all kernels of draws of ``rows`` rows."""
    logits = torch.zeros(rows, VOCAB, dtype=dtype, device=DEVICE)
    for name in ("none", "all"):
        sampler(logits, make_columns(rows, FILTERS[name]), name)()
    torch.cuda.synchronize()


def compile_all() -> None:
    """Fill Triton's cache, a process for each number of rows and type."""
    cases = list(itertools.product(ROWS, (torch.float32, torch.bfloat16)))
    with multiprocessing.get_context("spawn").Pool(len(cases)) as pool:
        pool.starmap(compile_for, cases)


def differing(name: str, shape: str, draws: int) -> int:
    """Tokens of ``draws`` rows that the reference draws otherwise."""
    count = 0
    for _ in range(draws // COMPARED):
        logits = make_logits(shape, COMPARED, torch.float32)
        columns = make_columns(COMPARED, FILTERS[name])
        drawn = sampler(logits, columns, name)()
        count += int((drawn != reference(logits, *columns)).sum())
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument(
        "--draws", type=int, default=COMPARED, help=f"rows compared, a multiple of {COMPARED}"
    )
    options = parser.parse_args()
    began = time.perf_counter()
    compile_all()
    bandwidth = copy_rate(torch.device("cuda"))
    times = []
    for shape, dtype in (
        ("zipf", torch.float32),
        ("zipf", torch.bfloat16),
        ("normal", torch.float32),
    ):
        for rows in ROWS:
            logits = make_logits(shape, rows, dtype)
            floor = logits.numel() * logits.element_size() / bandwidth * 1e6
            for name, filters in FILTERS.items():
                columns = make_columns(rows, filters)
                call = sampler(logits, columns, name)
                times.append(
                    {
                        "logits": shape,
                        "dtype": str(dtype).removeprefix("torch."),
                        "rows": rows,
                        "filters": name,
                        "floor_us": round(floor, 1),
                        "us": round(replay_us(call, options.replays), 1),
                    }
                )
    differ = [
        {
            "logits": shape,
            "filters": name,
            "draws": options.draws,
            "differ": differing(name, shape, options.draws),
        }
        for shape in ("zipf", "normal")
        for name in FILTERS
    ]
    report = {
        "device": torch.cuda.get_device_name(),
        "vocab": VOCAB,
        "seconds": round(time.perf_counter() - began, 1),
        "copy_bandwidth": round(bandwidth),
        "times": times,
        "differ": differ,
    }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
