"""What a draft's passes cost on this CPU, beside the bytes that they have to read.

    python benchmarks/bench_cpu_draft.py [--model pycoder] [--draft FOLDER] [--json FILE]

A pass is one forward of n tokens of a sequence and the logits of the last: n = 1 is a step of the
draft loop, more are the extend behind a verify step. Without --draft, random one-layer drafts as
wide as the target. The floor is bytes of weights, head and KV / stream bandwidth, which is
measured in the same run, between the passes. One thread.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_cpu_forward import PAGE_SIZE, make_batch

from outrider.engine.kv_pool import KVPool, bytes_per_token
from outrider.engine.models import load_model
from outrider.engine.models.draft_loader import load_draft
from outrider.engine.models.draft_net import DraftNet
from outrider.engine_core.draft_config import DraftAlgorithm, DraftConfig
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.model_path import resolve_model
from outrider.kernels.native_cpu import measure_stream_bandwidth

TOKENS = (1, 2, 6, 16)
ALGORITHMS: dict[DraftAlgorithm, str] = {
    "EAGLE": "LlamaForCausalLMEagle",
    "EAGLE3": "LlamaForCausalLMEagle3",
}


def random_draft(folder: Path, target: Path, algorithm: DraftAlgorithm) -> Path:
    """The config.json of a one-layer draft as wide as the target."""
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    config |= {"architectures": [ALGORITHMS[algorithm]], "num_hidden_layers": 1, "bias": False}
    if algorithm == "EAGLE3":
        config["draft_vocab_size"] = config["vocab_size"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pass_bytes(net: DraftNet, target_item: int) -> int:
    """Bytes of weights that a pass reads; ``target_item``: bytes of an element of the target's."""
    config, hidden = net.config, net.config.model.hidden_size
    total = net.weight_bytes
    if config.algorithm == "EAGLE3" and config.has_fc:
        total -= config.feature_size * hidden * target_item  # read when features come, once a round
    if config.owns_embedding:
        total -= config.model.vocab_size * hidden * target_item
    if not (config.owns_head or config.hot_tokens):
        total += config.draft_vocab_size * hidden * target_item
    return total


def runs(net: DraftNet, context: int, tokens: int, kv: KVPool) -> dict[str, Callable[[], object]]:
    batch = make_batch(1, tokens, context)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, net.config.model.hidden_size, generator=generator)
    features = torch.randn(tokens, net.config.feature_size, generator=generator)
    last = net.forward(batch, hidden, kv).head_input[-1:].clone()
    return {
        "pass": lambda: net.logits(net.forward(batch, hidden, kv).head_input[-1:]),
        "forward": lambda: net.forward(batch, hidden, kv),
        "logits": lambda: net.logits(last),
        "fuse": lambda: net.fuse(features),
    }


def elapsed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(
    name: str, net: DraftNet, config: DraftConfig, item: int, context: int, budget: float
) -> list[dict[str, object]]:
    """One line for each number of tokens, in microseconds."""
    pages = -(-(context + max(TOKENS)) // PAGE_SIZE)
    kv = KVPool(pages, PAGE_SIZE, config.model, net.dtype, torch.device("cpu"))
    kv.data.normal_()
    work = {tokens: runs(net, context, tokens, kv) for tokens in TOKENS}
    times: dict[tuple[int, str], list[float]] = {(n, k): [] for n in work for k in work[n]}
    weights = pass_bytes(net, item)
    bandwidths: list[float] = []
    deadline = time.perf_counter() + budget
    while time.perf_counter() < deadline:
        bandwidths.append(measure_stream_bandwidth(weights))
        for (tokens, kind), kept in times.items():
            run = work[tokens][kind]
            run()
            kept += [elapsed(run) for _ in range(3)]
    bandwidth = statistics.median(bandwidths)
    floor = (weights + context * bytes_per_token(config.model, net.dtype)) / bandwidth
    lines: list[dict[str, object]] = []
    for tokens in TOKENS:
        line: dict[str, object] = {"draft": name, "tokens": tokens, "floor_us": floor * 1e6}
        for kind in work[tokens]:
            line[f"{kind}_us"] = statistics.median(times[tokens, kind]) * 1e6
        lines.append({**line, "weight_mb": weights / 1e6, "stream_gb_s": bandwidth / 1e9})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pycoder")
    parser.add_argument("--draft", type=Path, help="an EAGLE or EAGLE3 draft")
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="EAGLE3")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="per draft")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve_model(arguments.model)
    config, cpu = load_model_config(folder), torch.device("cpu")
    target = load_model(folder, config, torch.float32, cpu)
    item = target.embedding.dtype.itemsize
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        drafts: list[tuple[DraftAlgorithm, Path, bool]] = [
            (name, random_draft(Path(temporary) / name, folder, name), True) for name in ALGORITHMS
        ]
        if arguments.draft:
            drafts = [(arguments.algorithm, arguments.draft, False)]
        for algorithm, draft, dummy in drafts:
            found = load_draft_config(draft, config, algorithm)
            net = load_draft(draft, found, target, torch.float32, cpu, "dummy" if dummy else "auto")
            lines += measure(algorithm, net, found, item, arguments.context, arguments.seconds)
    for line in lines:
        print(
            f"{line['draft']:7} {line['tokens']:3} tokens: pass {line['pass_us']:6.0f} us"
            f"  (forward {line['forward_us']:5.0f}, logits {line['logits_us']:5.0f},"
            f" fuse {line['fuse_us']:5.0f})  floor {line['floor_us']:6.0f}"
            f"  {line['weight_mb']:.2f} MB at {line['stream_gb_s']:.1f} GB/s"
        )
    if arguments.json:
        report = {"model": arguments.model, "context": arguments.context, "threads": 1}
        arguments.json.write_text(json.dumps({**report, "passes": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
