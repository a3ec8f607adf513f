"""What a forward pass costs on this CPU, beside its floor, plain torch and transformers.

    python benchmarks/bench_cpu_forward.py [--model pycoder] [--context 256] [--json FILE]

T(n) is the time of one step of n query tokens with logits for each: "chain" rows verify n tokens
of one sequence, "batch" rows decode n sequences. The floor of a step is
max(weight bytes / stream bandwidth, operations / multiply-add rate) + KV bytes / bandwidth; both
rates are measured in the same run, between the steps, because a neighbour on the same core
changes them. One thread.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.engine.forward_batch import ForwardBatch
from outrider.engine.kv_pool import KVPool, bytes_per_token
from outrider.engine.models import Model, load_model
from outrider.engine_core.model_config import ModelConfig, load_model_config
from outrider.engine_core.model_path import resolve_model
from outrider.kernels.native_cpu import measure_multiply_add_rate, measure_stream_bandwidth

CHAINS = (1, 2, 4, 8, 12, 16, 32, 64, 384)
BATCHES = (8, 32)
PAGE_SIZE = 16


def make_batch(rows: int, queries: int, context: int, last_only: bool = False) -> ForwardBatch:
    """``rows`` sequences of ``context`` tokens, each extended by ``queries`` tokens."""
    length = context + queries
    pages = -(-length // PAGE_SIZE)
    table = torch.arange(1, rows * pages + 1, dtype=torch.int32).view(rows, pages)
    index = torch.arange(context, length)
    slots = table[:, index // PAGE_SIZE].long() * PAGE_SIZE + index % PAGE_SIZE
    tokens = rows * queries
    wanted = torch.arange(1, rows + 1) * queries - 1 if last_only else torch.arange(tokens)
    return ForwardBatch(
        input_ids=torch.randint(0, 1000, (tokens,), generator=torch.Generator().manual_seed(1)),
        positions=index.repeat(rows),
        kv_slots=slots.flatten(),
        cu_q=torch.arange(0, tokens + 1, queries, dtype=torch.int32),
        kv_lens=torch.full((rows,), length, dtype=torch.int32),
        page_table=table,
        tree_bits=torch.zeros(tokens, dtype=torch.int64),
        is_tree=torch.zeros(rows, dtype=torch.uint8),
        logits_index=wanted,
    )


def operations(config: ModelConfig, tokens: int, wanted: int, context: int) -> float:
    """Floating-point operations of a step: matmuls and attention."""
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    layer += 3 * config.hidden_size * config.intermediate_size
    layer += 2 * config.q_size * context
    head = config.hidden_size * config.vocab_size * wanted
    return 2.0 * (config.num_hidden_layers * layer * tokens + head)


def step(model: Model, batch: ForwardBatch, kv: KVPool) -> Callable[[], None]:
    def run() -> None:
        model.logits(model.forward(batch, kv)[batch.logits_index])

    return run


def seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure_steps(
    name: str, model: Model, config: ModelConfig, context: int, budget: float
) -> list[dict[str, object]]:
    """One line per shape; the repeats of all shapes are interleaved with the two rates."""
    shapes = [("chain", n, make_batch(1, n, context, n > 64)) for n in CHAINS]
    shapes += [("batch", n, make_batch(n, 1, context)) for n in BATCHES]
    pages = max(int(batch.page_table.max()) for _, _, batch in shapes)
    kv = KVPool(pages, PAGE_SIZE, config, model.dtype, torch.device("cpu"))
    kv.data.normal_()  # untouched pages would all alias one page of zeros
    runs = [step(model, batch, kv) for _, _, batch in shapes]
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    rates: list[float] = []
    bandwidths: list[float] = []
    deadline = time.perf_counter() + budget
    while time.perf_counter() < deadline or len(times[0]) < 3:
        rates.append(measure_multiply_add_rate())
        bandwidths.append(measure_stream_bandwidth(model.weight_bytes))
        for run, kept in zip(runs, times, strict=True):
            run()  # steps of one shape follow each other when serving, so the caches are theirs
            kept += [seconds(run) for _ in range(3)]
    token_bytes = bytes_per_token(config, model.dtype)
    lines: list[dict[str, object]] = []
    rate, bandwidth = statistics.median(rates), statistics.median(bandwidths)
    for (kind, n, batch), kept in zip(shapes, times, strict=True):
        work = operations(config, batch.input_ids.shape[0], batch.logits_index.shape[0], context)
        kv_bytes = int(batch.kv_lens.sum()) * token_bytes
        floor = max(model.weight_bytes / bandwidth, work / rate) + kv_bytes / bandwidth
        typical = statistics.median(kept)
        lines.append(
            {
                "path": name,
                "rows": kind,
                "tokens": n,
                "median_ms": typical * 1e3,
                "min_ms": min(kept) * 1e3,
                "to_t1": typical / statistics.median(times[0]),
                "floor_ms": floor * 1e3,
                "to_floor": typical / floor,
                "gflops": work / typical / 1e9,
                "peak_gflops": rate / 1e9,
                "stream_gb_s": bandwidth / 1e9,
                "repeats": len(kept),
            }
        )
    return lines


def decode_rate(model: Model, config: ModelConfig, prompt: list[int], new: int) -> float:
    """Greedy tokens/s of a bare loop at batch 1, prefill included."""
    total = len(prompt) + new
    pages = -(-total // PAGE_SIZE)
    kv = KVPool(pages, PAGE_SIZE, config, model.dtype, torch.device("cpu"))
    begin = time.perf_counter()
    tokens, done = prompt, 0
    for _ in range(new):
        batch = make_batch(1, len(tokens), done, last_only=True)
        batch.input_ids = torch.tensor(tokens)
        logits = model.logits(model.forward(batch, kv)[batch.logits_index])
        done += len(tokens)
        tokens = [int(logits.argmax())]
    return new / (time.perf_counter() - begin)


def compare_generate(model: Model, config: ModelConfig, folder: Path) -> dict[str, float]:
    """Tokens/s of transformers' generate beside ours, interleaved, medians of 5."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    prompt = torch.randint(2, 1000, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    new = 128
    theirs: list[float] = []
    ours: list[float] = []
    for repeat in range(6):
        with torch.inference_mode():
            begin = time.perf_counter()
            ids = reference.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=new, min_new_tokens=new
            )
            theirs.append((ids.shape[1] - len(prompt)) / (time.perf_counter() - begin))
        ours.append(decode_rate(model, config, prompt, new))
        if repeat == 0:
            theirs.clear()
            ours.clear()
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {"tokens_per_s": mine, "transformers_tokens_per_s": other, "speedup": mine / other}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pycoder")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0, help="per path")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve_model(arguments.model)
    config = load_model_config(folder)
    device = torch.device("cpu")
    lines: list[dict[str, object]] = []
    models = {
        "native": load_model(folder, config, torch.float32, device),
        "torch": load_model(folder, config, torch.float32, device, native=False),
    }
    for name, model in models.items():
        lines += measure_steps(name, model, config, arguments.context, arguments.seconds)
    generate = compare_generate(models["native"], config, folder)
    for line in lines:
        print(
            f"{line['path']:7}{line['rows']:6} T({line['tokens']:3}) {line['median_ms']:9.3f} ms"
            f"  min {line['min_ms']:9.3f}  T/T(1) {line['to_t1']:6.2f}  floor"
            f" {line['floor_ms']:8.3f} ms  ratio {line['to_floor']:5.2f}"
            f"  {line['gflops']:5.1f}/{line['peak_gflops']:.1f} GFLOP/s"
            f"  {line['stream_gb_s']:.1f} GB/s"
        )
    print({key: round(value, 2) for key, value in generate.items()})
    if arguments.json:
        report = {"model": arguments.model, "context": arguments.context, "threads": 1}
        arguments.json.write_text(
            json.dumps({**report, "steps": lines, "generate": generate}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
