"""The small fused kernels of a Qwen3-8B-shaped step on an NVIDIA GPU, one by one.

    python benchmarks/bench_fused_gpu.py > h200-fused.json

A time is a graph of several calls, replayed, by events: the median replay over the number of
calls. The floor of a call is its bytes over the copy bandwidth of the same run; small operands
stay in L2, as they do between the kernels of a step, so there the time to launch (an empty
kernel's, in the same kind of graph) is what matters. Each kernel runs with and without
programmatic dependent launch.
"""

# mypy: disable-error-code="no-untyped-call"

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable

import torch
import triton

from outrider.engine.bench.rates import copy_rate
from outrider.kernels.add_rms_norm_gpu import add_rms_norm
from outrider.kernels.confidence_logits_gpu import confidence_logits
from outrider.kernels.embedding_gpu import embed
from outrider.kernels.greedy_argmax_gpu import greedy_argmax
from outrider.kernels.qk_rope_write_gpu import qk_norm_rope_write
from outrider.kernels.rms_norm_gpu import rms_norm
from outrider.kernels.silu_mul_gpu import gelu_tanh_mul, silu_mul
from outrider.kernels.verify_lens_gpu import allocate_verify

HIDDEN, INNER, VOCAB = 4096, 12288, 151_936
HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 32, 8, 128, 4096
TOKENS = (1, 8, 64, 256, 8192)
DTYPE, DEVICE, EPS = torch.bfloat16, "cuda", 1e-6
# A timed call, given whether to use programmatic dependent launch, and the bytes it moves.
Case = tuple[Callable[[bool], object], int]


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE).normal_()


def indices(count: int, limit: int) -> torch.Tensor:
    return torch.randint(limit, (count,), device=DEVICE)


def size(*tensors: torch.Tensor) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def rms_norm_case(tokens: int) -> Case:
    x, weight = randn(tokens, HIDDEN), randn(HIDDEN)
    return lambda pdl: rms_norm(x, weight, EPS, pdl=pdl), 2 * size(x) + size(weight)


def add_rms_norm_case(tokens: int) -> Case:
    x, residual, weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), randn(HIDDEN)
    moved = 4 * size(x) + size(weight)
    return lambda pdl: add_rms_norm(x, residual, weight, EPS, pdl=pdl), moved


def qk_case(tokens: int) -> Case:
    qkv = randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    norms = randn(2, HEAD_DIM)
    table = randn(2, POSITIONS, HEAD_DIM // 2, dtype=torch.float32)
    caches = randn(2, tokens, KV_HEADS, HEAD_DIM)
    positions, slots = indices(tokens, POSITIONS), torch.randperm(tokens, device=DEVICE)
    moved = 2 * size(qkv) + size(norms, positions, slots) + tokens * size(table[:, 0])

    def call(pdl: bool) -> object:
        return qk_norm_rope_write(
            qkv,
            norms[0],
            norms[1],
            EPS,
            table[0],
            table[1],
            positions,
            slots,
            caches[0],
            caches[1],
            HEADS,
            KV_HEADS,
            pdl=pdl,
        )

    return call, moved


def silu_case(tokens: int) -> Case:
    gate_up = randn(tokens, 2 * INNER)
    return lambda pdl: silu_mul(gate_up, pdl=pdl), size(gate_up) * 3 // 2


def gelu_case(tokens: int) -> Case:
    gate_up = randn(tokens, 2 * INNER)
    return lambda pdl: gelu_tanh_mul(gate_up, pdl=pdl), size(gate_up) * 3 // 2


def embed_case(tokens: int) -> Case:
    table, ids = randn(VOCAB, HIDDEN), indices(tokens, VOCAB)
    return lambda pdl: embed(ids, table, pdl=pdl), size(ids) + 2 * tokens * size(table[0])


def argmax_case(tokens: int, dtype: torch.dtype) -> Case:
    logits = randn(tokens, VOCAB, dtype=dtype)
    return lambda pdl: greedy_argmax(logits, pdl=pdl), size(logits) + 8 * tokens


def allocate_case(rows: int, drafts: int) -> Case:
    logits = torch.randn(rows, drafts, device=DEVICE)
    temperatures = torch.ones(drafts, device=DEVICE)
    confidence = torch.empty_like(logits)
    ints = torch.full((2, rows), drafts, dtype=torch.int32, device=DEVICE)
    budget = torch.full((1,), rows * drafts // 2, dtype=torch.int32, device=DEVICE)

    def call(pdl: bool) -> None:
        allocate_verify(
            logits, temperatures, ints[0], budget, limit=drafts, eps=EPS, confidence=confidence,
            verify_lens=ints[1], pdl=pdl,
        )  # fmt: skip

    return call, size(logits, confidence, ints, budget)


def confidence_case(rows: int, drafts: int) -> Case:
    hidden, bonus = randn(drafts, rows, HIDDEN), indices(rows, VOCAB)
    before, tokens = randn(VOCAB, 64), indices(drafts * rows, VOCAB).view(drafts, rows)
    weight = torch.randn(HIDDEN + 64, device=DEVICE)
    bias = torch.zeros((), device=DEVICE)

    def call(pdl: bool) -> None:
        confidence_logits(weight, bias, before, hidden, bonus, tokens, pdl=pdl)

    return call, size(hidden, weight, bonus, tokens) + drafts * rows * (2 * 64 + 4)


CASES: dict[str, Callable[[int], Case]] = {
    "rms_norm": rms_norm_case,
    "add_rms_norm": add_rms_norm_case,
    "qk_norm_rope_write": qk_case,
    "silu_mul": silu_case,
    "gelu_tanh_mul": gelu_case,
    "embed": embed_case,
    "greedy_argmax bfloat16": lambda tokens: argmax_case(tokens, torch.bfloat16),
    "greedy_argmax float32": lambda tokens: argmax_case(tokens, torch.float32),
    "allocate_verify 7": lambda rows: allocate_case(rows, 7),
    "allocate_verify 15": lambda rows: allocate_case(rows, 15),
    "confidence_logits 7": lambda rows: confidence_case(rows, 7),
}


def graph_us(call: Callable[[], object], calls: int, replays: int) -> float:
    """Median microseconds of a call inside a graph of ``calls`` of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
    for _ in range(3):
        graph.replay()
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times: list[float] = [begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)]
    return statistics.median(times) * 1e3 / calls


def measure(name: str, tokens: int, bandwidth: float) -> list[dict[str, object]]:
    """The rows of one kernel at one size, without and with dependent launch."""
    call, moved = CASES[name](tokens)
    # long enough a graph for the events, short enough for the largest sizes
    calls = 50 if moved < 2**26 else 5
    rows: list[dict[str, object]] = []
    for pdl in (False, True):
        us = graph_us(functools.partial(call, pdl), calls, 15)
        floor = moved / bandwidth * 1e6
        rows.append(
            {
                "kernel": name,
                "tokens": tokens,
                "pdl": pdl,
                "us": round(us, 3),
                "bytes": moved,
                "gb_per_s": round(moved / us / 1e3, 1),
                "floor_us": round(floor, 3),
                "ratio": round(us / floor, 3),
            }
        )
    return rows


def main() -> int:
    """Measure all and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    args = parser.parse_args()
    bandwidth = copy_rate(torch.device("cuda"))
    one = torch.zeros(1, device=DEVICE)
    launch = graph_us(lambda: one.fill_(0.0), 50, 15)
    rows: list[dict[str, object]] = []
    for name in args.kernels:
        for tokens in args.tokens:
            rows += measure(name, tokens, bandwidth)
            torch.cuda.empty_cache()
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": str(DTYPE),
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "launch_us": round(launch, 3),
        "rows": rows,
    }
    json.dump(report, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
