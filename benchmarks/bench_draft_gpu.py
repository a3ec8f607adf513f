"""An EAGLE3 draft's passes on an NVIDIA GPU: a decode step, all of a round's, and the extend.

    python benchmarks/bench_draft_gpu.py --json h200-draft.json

Of two drafts with random weights: that of benchmarks/configs/qwen3-8b-eagle3, and one layer of
pycoder's shape, whose steps are launches and little else. A time is a graph of several calls,
replayed, by events: the median replay over the number of calls. The floor of a call is the bytes
of the weights that it multiplies with, and of the KV that it reads, over the copy bandwidth of the
same run; ``launches`` counts the kernels of one call. Rows stand at context 512 and have 3 steps,
or trees of 4 branches and 16 nodes; the extend runs over all nodes, of which 3 were accepted.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypedDict

import msgspec
import torch
import triton
from bench_fused_gpu import graph_us
from torch.profiler import ProfilerActivity, profile

from outrider.engine.bench.rates import copy_rate
from outrider.engine.forward_batch import ForwardBatch, RowGroup
from outrider.engine.kv_pool import KVPool
from outrider.engine.models.draft_loader import load_draft
from outrider.engine.models.draft_net import DraftNet, GpuDraftNet
from outrider.engine.models.gpu_decoder import GpuDecoder
from outrider.engine.speculative.device_drafter import (
    DrafterContext,
    DraftRows,
    LoadedDraft,
    Verdict,
)
from outrider.engine.speculative.eagle_drafter import EagleDrafter
from outrider.engine.weights import RandomTensors
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.draft_config import DraftConfig, SpecShape
from outrider.engine_core.draft_config_json import load_draft_config
from outrider.engine_core.model_config import ModelConfig, load_model_config

ROOT = Path(__file__).resolve().parent.parent
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
CONTEXT, PAGE_SIZE, ACCEPTED = 512, 16, 3
COLUMNS = CONTEXT // PAGE_SIZE + 8
SHAPES = {"chain": SpecShape(3, 1, 4), "tree": SpecShape(3, 4, 16)}


class Row(TypedDict):
    """One measurement."""

    model: str
    call: str
    rows: int
    launches: int
    us: float
    bytes: int
    floor_us: float
    ratio: float


def qwen() -> tuple[ModelConfig, DraftConfig]:
    """Target and draft of benchmarks/configs."""
    folder = ROOT / "benchmarks" / "configs"
    target = load_model_config(folder / "qwen3-8b")
    return target, load_draft_config(folder / "qwen3-8b-eagle3", target, "EAGLE3")


def pycoder() -> tuple[ModelConfig, DraftConfig]:
    """The embedded target, and a draft of one of its layers with a head of its own."""
    target = load_model_config(ROOT / "models" / "pycoder-11m")
    model = msgspec.structs.replace(
        target, num_hidden_layers=1, sliding_windows=target.sliding_windows[:1], qk_norm=False
    )
    draft = DraftConfig(
        algorithm="EAGLE3",
        model=model,
        feature_layers=(2, 6, 9),
        feature_size=3 * target.hidden_size,
        draft_vocab_size=target.vocab_size,
        owns_embedding=False,
        owns_head=True,
    )
    return target, draft


MODELS: dict[str, Callable[[], tuple[ModelConfig, DraftConfig]]] = {
    "qwen3-8b": qwen,
    "pycoder": pycoder,
}


def load(target: ModelConfig, config: DraftConfig) -> DraftNet:
    """The draft of a target of one layer: of a target it uses the tables alone."""
    one = msgspec.structs.replace(
        target, num_hidden_layers=1, sliding_windows=target.sliding_windows[:1]
    )
    model = GpuDecoder(RandomTensors(DTYPE, DEVICE), one, DTYPE, DEVICE)
    return load_draft(ROOT, config, model, DTYPE, DEVICE, "dummy")


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Round:
    """The drafter's part in a round of ``rows`` rows of ``shape``."""

    def __init__(self, net: DraftNet, shape: SpecShape, rows: int) -> None:
        width, config = shape.num_draft_tokens, net.config
        tokens = rows * width
        kv = KVPool(rows * COLUMNS, PAGE_SIZE, config.model, DTYPE, DEVICE)
        kv.data.normal_()
        pages = torch.randperm(rows * COLUMNS, device=DEVICE) + 1
        table = pages.reshape(rows, COLUMNS).int()
        self.draft = LoadedDraft(net, kv, shape)
        self.drafter = EagleDrafter(
            DrafterContext(EngineConfig(model="m"), rows, CONTEXT, DEVICE, table), self.draft
        )
        slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        lengths = torch.full_like(slots, CONTEXT)
        cu_q = torch.arange(0, tokens + 1, width, dtype=torch.int32, device=DEVICE)
        self.rows = DraftRows(
            slots, cu_q, torch.full_like(slots, width - 1), lengths,
            torch.zeros(tokens, dtype=torch.int32, device=DEVICE),
            torch.zeros(tokens, dtype=torch.int32, device=DEVICE),
            torch.zeros_like(slots), torch.zeros_like(slots),
        )  # fmt: skip
        batch = ForwardBatch(
            input_ids=torch.randint(config.model.vocab_size, (tokens,), device=DEVICE),
            positions=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
            kv_slots=(table[:, CONTEXT // PAGE_SIZE, None] * PAGE_SIZE
                      + torch.arange(width, device=DEVICE)).flatten().long(),
            cu_q=cu_q,
            kv_lens=lengths + width,
            page_table=table,
            tree_bits=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
            is_tree=torch.zeros(rows, dtype=torch.uint8, device=DEVICE),
            logits_index=torch.arange(tokens, device=DEVICE),
            slots=slots,
            groups=(RowGroup(0, rows, width),),
        )  # fmt: skip
        path = torch.arange(shape.steps + 1, dtype=torch.int32, device=DEVICE).repeat(rows, 1)
        self.verdict = Verdict(
            slots, torch.full_like(slots, ACCEPTED), path, path, lengths,
            torch.full((rows,), 2, dtype=torch.uint8, device=DEVICE), lengths, batch,
            torch.randn(tokens, config.feature_size, device=DEVICE).to(DTYPE),
        )  # fmt: skip
        self._ids = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        self._drafts = torch.zeros(1, rows, dtype=torch.int64, device=DEVICE)

    def decode(self) -> None:
        """One pass of a chain, from its layout to its token."""
        self.drafter._passes.chain(self.rows, self._ids, self.drafter.hidden, self._drafts)

    def propose(self) -> None:
        """All of a round's passes."""
        self.drafter.propose(self.rows)

    def extend(self) -> None:
        """The pass over what was accepted, and level 1 of what follows."""
        self.drafter.align(self.verdict)


def launches(call: Callable[[], None]) -> int:
    """Kernels, copies and fills that a call enqueues."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in found.events())


def weight_bytes(config: DraftConfig, extend: bool) -> int:
    """Bytes of the matrices that a pass multiplies with."""
    model = config.model
    hidden, inner = model.hidden_size, model.intermediate_size
    layer = (model.q_size + 2 * model.kv_size) * hidden + hidden * model.q_size
    layer += 3 * hidden * inner
    first = (model.q_size + 2 * model.kv_size) * hidden  # it takes in twice as much
    fc = hidden * config.feature_size if extend else 0
    head = config.draft_vocab_size * hidden
    return DTYPE.itemsize * (model.num_hidden_layers * layer + first + fc + head)


def measure(name: str, batch_sizes: list[int], bandwidth: float) -> list[Row]:
    """All calls of one draft."""
    target, config = MODELS[name]()
    net = load(target, config)
    assert isinstance(net, GpuDraftNet)
    sizes = [rows * n for rows in batch_sizes for n in (1, 4, 8, 16)]
    net.tune(sizes)
    model = config.model
    kv = 2 * model.kv_size * DTYPE.itemsize * model.num_hidden_layers * CONTEXT
    out: list[Row] = []
    for rows in batch_sizes:
        for kind, shape in SHAPES.items():
            made = Round(net, shape, rows)
            passes = shape.steps - 1
            step = weight_bytes(config, False) + rows * kv
            extend = weight_bytes(config, True) + rows * kv
            cases: list[tuple[str, Callable[[], None], int]] = [
                (f"{kind}: {passes} decode steps", made.propose, passes * step),
                (f"{kind}: extend", made.extend, extend),
            ]
            if kind == "chain":
                cases.insert(0, ("chain: decode step", made.decode, step))
            for call, run, moved in cases:
                with torch.inference_mode():
                    count = launches(run)
                    us = graph_us(partial(run), 10, 30)
                floor = moved / bandwidth * 1e6
                out.append(
                    Row(
                        model=name,
                        call=call,
                        rows=rows,
                        launches=count,
                        us=round(us, 2),
                        bytes=moved,
                        floor_us=round(floor, 2),
                        ratio=round(us / floor, 3),
                    )
                )
                print(out[-1], file=sys.stderr, flush=True)
    return out


def main() -> int:
    """Measure all and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    bandwidth = copy_rate(DEVICE)
    measured: list[Row] = []
    for name in args.models:
        measured += measure(name, args.rows, bandwidth)
        torch.cuda.empty_cache()
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": str(DTYPE),
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "rows": measured,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
