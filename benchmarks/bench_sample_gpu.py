"""Sampling over a vocabulary of 151,936 on an NVIDIA GPU: time a graph replay, tokens that differ.

    python benchmarks/bench_sample_gpu.py > h200-sample.json

A time is the median replay, by events, of a graph of one ``coupled_sample``; the floor is one
read of the logits at the copy bandwidth measured in the same run. Logits: ``zipf`` falls with the
logarithm of the rank, as a language model's do; ``normal`` is flat, top-p keeps 93,000 tokens.
``differ`` counts tokens unlike those of the float64 torch reference.
"""

# mypy: disable-error-code="no-untyped-call"

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable

import torch

from outrider.engine.bench.rates import copy_rate
from outrider.kernels.coupled_sample import coupled_sample as reference
from outrider.kernels.coupled_sample_gpu import coupled_sample

VOCAB, ROWS = 151_936, (1, 8, 64, 512)
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


def differing(filters: tuple[int, float, float], shape: str, draws: int) -> int:
    """Tokens of ``draws`` rows that the reference draws otherwise; 16 rows at a time."""
    count = 0
    for _ in range(draws // 16):
        logits = make_logits(shape, 16, torch.float32)
        columns = make_columns(16, filters)
        count += int((coupled_sample(logits, *columns) != reference(logits, *columns)).sum())
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--draws", type=int, default=512, help="rows compared with the reference")
    options = parser.parse_args()
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
                row: dict[str, object] = {
                    "logits": shape,
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": rows,
                    "filters": name,
                    "floor_us": round(floor, 1),
                }
                for pdl in (False, True):
                    call = functools.partial(
                        coupled_sample, logits, *columns, filtered=name != "none", pdl=pdl
                    )
                    row["pdl_us" if pdl else "us"] = round(replay_us(call, options.replays), 1)
                times.append(row)
    differ = [
        {
            "logits": shape,
            "filters": name,
            "draws": options.draws,
            "differ": differing(filters, shape, options.draws),
        }
        for shape in ("zipf", "normal")
        for name, filters in FILTERS.items()
    ]
    report = {
        "device": torch.cuda.get_device_name(),
        "vocab": VOCAB,
        "copy_bandwidth": round(bandwidth),
        "times": times,
        "differ": differ,
    }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
