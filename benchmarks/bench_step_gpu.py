"""The bookkeeping kernels of a step on an NVIDIA GPU: layout, page updates, walk, KV move, match.

    python benchmarks/bench_step_gpu.py > h200-step-kernels.json

A time is a graph of several calls, replayed, by events: the median replay over the number of
calls. Rows verify 16 nodes, as chains and as trees, over a Qwen3-8B-shaped pool at context 512.
These kernels move few bytes, save the KV move of trees, whose floor is given.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import TypedDict

import torch
from bench_fused_gpu import graph_us

from outrider.engine.bench.rates import copy_rate
from outrider.kernels.kv_move_gpu import move_accepted
from outrider.kernels.page_updates_gpu import apply_page_updates
from outrider.kernels.step_layout_gpu import lay_out
from outrider.kernels.suffix_match_gpu import append_tokens, suffix_match
from outrider.kernels.verify_walk_gpu import verify_walk

LAYERS, KV_HEADS, HEAD_DIM, PAGE_SIZE, CONTEXT, NODES = 36, 8, 128, 16, 512, 16
COLUMNS = CONTEXT // PAGE_SIZE + 8
DEVICE = "cuda"
CHAIN = [i - 1 for i in range(NODES)]
TREE = [-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 5, 6, 8, 8, 9, 12]
PATHS = {"chain, 5 accepted": [0, 1, 2, 3, 4], "tree, 5 accepted": [0, 2, 7, 9, 12]}


class Row(TypedDict):
    """One measurement."""

    kernel: str
    rows: int
    us: float
    floor_us: float | None


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Step:
    """Buffers of a step of ``rows`` rows of ``length`` tokens each."""

    def __init__(self, rows: int, length: int, kind: int, parents: list[int]) -> None:
        self.length = length
        tokens = rows * length
        self.slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.kinds = torch.full((rows,), kind, dtype=torch.uint8, device=DEVICE)
        self.starts = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.cu_q = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=DEVICE)
        self.tokens = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
        self.parents = int32(parents * rows)
        self.seq_lens = torch.full((rows,), CONTEXT, dtype=torch.int32, device=DEVICE)
        self.last_tokens, self.out_counts = self.starts.clone(), self.starts.clone()
        columns = max(COLUMNS, -(-length // PAGE_SIZE))
        pages = torch.randperm(rows * columns, device=DEVICE) + 1
        self.page_table = pages.reshape(rows, columns).int()
        self.ids, self.positions, self.kv_slots, self.bits = (
            torch.zeros(tokens, dtype=torch.int64, device=DEVICE) for _ in range(4)
        )
        self.kv_lens, self.before = self.starts.clone(), self.seq_lens.clone()
        self.is_tree = self.kinds.clone()
        self.accept_lens = self.starts.clone()
        self.emitted, self.path = (
            torch.zeros(rows, length, dtype=torch.int32, device=DEVICE) for _ in range(2)
        )

    def lay_out(self) -> None:
        lay_out(
            self.slots,
            self.kinds,
            self.starts,
            self.cu_q,
            self.tokens,
            self.parents,
            self.seq_lens,
            self.last_tokens,
            self.page_table,
            PAGE_SIZE,
            input_ids=self.ids,
            positions=self.positions,
            kv_slots=self.kv_slots,
            kv_lens=self.kv_lens,
            tree_bits=self.bits,
            is_tree=self.is_tree,
            starts_before=self.before,
            longest=self.length,
        )

    def walk(self, targets: torch.Tensor) -> None:
        verify_walk(
            targets,
            self.ids,
            self.parents,
            self.cu_q,
            self.cu_q,
            self.slots,
            self.before,
            self.seq_lens,
            self.last_tokens,
            self.out_counts,
            accept_lens=self.accept_lens,
            tokens=self.emitted,
            accept_idx=self.path,
        )

    def move(self, kv: torch.Tensor) -> None:
        move_accepted(
            kv,
            self.slots,
            self.before,
            self.page_table,
            PAGE_SIZE,
            self.accept_lens,
            self.path,
        )

    def update_pages(self) -> None:
        apply_page_updates(
            self.page_table, self.slots, self.starts, self.page_table[:, 0], self.cu_q[1:2]
        )


class Match:
    """A match in full texts int32[R, L], 15 drafts a row."""

    def __init__(self, text: torch.Tensor) -> None:
        rows, length = text.shape
        self.text = text
        self.slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.full_like(self.slots, length - 1)
        self.caps = torch.full_like(self.slots, NODES - 1)
        self.counts = torch.full_like(self.slots, 5)
        self.cu_q = torch.arange(0, rows * NODES + 1, NODES, dtype=torch.int32, device=DEVICE)
        self.tokens, self.parents = (
            torch.zeros(rows, NODES, dtype=torch.int32, device=DEVICE) for _ in range(2)
        )
        self.proposed, self.depths = self.slots.clone(), self.slots.clone()

    def propose(self) -> None:
        suffix_match(
            self.text, self.slots, self.seq_lens, self.cu_q, self.caps, 1, 17,
            tokens=self.tokens.view(-1), parents=self.parents.view(-1), proposed=self.proposed,
            depths=self.depths,
        )  # fmt: skip

    def append(self) -> None:
        append_tokens(self.text, self.slots, self.seq_lens, self.counts, self.tokens)


def measure() -> list[Row]:
    out: list[Row] = []
    bandwidth = copy_rate(torch.device("cuda"))

    def add(kernel: str, rows: int, call: Callable[[], None], moved: int = 0) -> None:
        floor = moved / bandwidth * 1e6 if moved else None
        out.append(Row(kernel=kernel, rows=rows, us=graph_us(call, 20, 50), floor_us=floor))

    for rows in (1, 8, 64):
        for length in (512, 2048, 40960):
            moved = 4 * rows * length
            for name, vocab in (("random text", 1000), ("text of few tokens", 4)):
                text = torch.randint(vocab, (rows, length), dtype=torch.int32, device=DEVICE)
                add(f"suffix match, {name}, {length}", rows, Match(text).propose, moved)
        add("append 5 tokens", rows, Match(text).append)
    chunk = Step(2, 8192, 0, CHAIN * 512)
    add("layout, 2 chunks of 8192", 2, chunk.lay_out)
    for rows in (1, 8, 64, 256):
        for name, parents in (("chains", CHAIN), ("trees", TREE)):
            step = Step(rows, NODES, 2, parents)
            add(f"layout, {name} of {NODES}", rows, step.lay_out)
            step.lay_out()
            step.ids.copy_(torch.arange(NODES, device=DEVICE).repeat(rows))
            refused = torch.full_like(step.ids, 99)
            add("walk, 1 accepted", rows, partial(step.walk, refused))
            last = [max([c for c, p in enumerate(parents) if p == n] or [0]) for n in range(NODES)]
            targets = torch.tensor(last * rows, device=DEVICE)
            add(f"walk, {name} accepted", rows, partial(step.walk, targets))
        add("page updates, one a row", rows, step.update_pages)
        step.before.fill_(CONTEXT)
        places = (rows * COLUMNS + 1) * PAGE_SIZE
        kv = torch.zeros(LAYERS, 2, places, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        for name, path in PATHS.items():
            step.accept_lens.fill_(len(path))
            step.path[:, : len(path)] = int32(path)
            moves = rows * sum(node != i for i, node in enumerate(path))
            moved = 2 * moves * kv[:, :, 0].numel() * kv.element_size()
            add(f"KV move, {name}", rows, partial(step.move, kv), moved)
        del kv
    return out


if __name__ == "__main__":
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": measure()}, indent=1))
