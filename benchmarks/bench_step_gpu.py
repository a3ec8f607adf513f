"""The small kernels of a step on an NVIDIA GPU: layout, page updates, edits, walk, KV move, match.

    python benchmarks/bench_step_gpu.py > h200-step-kernels.json

A time is a graph of several calls, replayed, by events: the median replay over the number of
calls. Rows verify 16 nodes, as chains and as trees, over a Qwen3-8B-shaped pool at context 512.
These kernels move few bytes, save the KV move of trees and the edits of bfloat16 logits over a
vocabulary of 151,936, whose floors are given.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import TypedDict

import torch
from bench_fused_gpu import graph_us

from outrider.engine.bench.rates import copy_rate
from outrider.kernels.force_accept_gpu import force_accept
from outrider.kernels.kv_move_gpu import move_accepted
from outrider.kernels.logit_edits_gpu import count_emitted, edit_logits
from outrider.kernels.page_updates_gpu import apply_page_updates
from outrider.kernels.step_layout_gpu import lay_out
from outrider.kernels.suffix_match_gpu import append_tokens, suffix_match
from outrider.kernels.verify_walk_gpu import verify_walk

LAYERS, KV_HEADS, HEAD_DIM, PAGE_SIZE, CONTEXT, NODES = 36, 8, 128, 16, 512, 16
COLUMNS = CONTEXT // PAGE_SIZE + 8
VOCAB, LISTED = 151_936, 300  # logits, and tokens with a bias
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

    def force(self, targets: torch.Tensor) -> None:
        force_accept(
            targets,
            self.ids,
            self.positions,
            self.bits,
            self.parents,
            self.cu_q,
            self.cu_q,
            self.slots,
            self.before,
            floor=4,
            threshold=1 << 23,
            tokens=self.kv_slots,
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


class Edited:
    """Logits of ``step``'s nodes, and slots that all have penalties, a bias or neither."""

    def __init__(self, step: Step, penalized: bool, listed: int) -> None:
        rows, nodes = len(step.slots), len(step.ids)
        self.step = step
        self.logits = torch.randn(nodes, VOCAB, device=DEVICE).bfloat16()
        self.penalized = torch.full((rows,), penalized, device=DEVICE)
        self.penalties = torch.tensor([[1 / 1.2, 1.2, 0.1, 0.1]], device=DEVICE).repeat(rows, 1)
        self.history = torch.zeros(rows, VOCAB, dtype=torch.int32, device=DEVICE)
        self.bounds = int32([listed, listed, listed] * rows).view(rows, 3)
        self.ids = torch.arange(LISTED, dtype=torch.int32, device=DEVICE).repeat(rows, 1)
        self.values = torch.ones(rows, LISTED, device=DEVICE)
        # Logits read and written in float32; counts once a row.
        self.moved = nodes * VOCAB * 6 + penalized * rows * VOCAB * 4

    def edit(self) -> None:
        step = self.step
        edit_logits(
            self.logits,
            step.cu_q,
            step.cu_q,
            step.slots,
            step.ids,
            step.positions,
            step.bits,
            step.out_counts,
            self.penalized,
            self.penalties,
            self.history,
            step.starts,
            self.bounds,
            self.ids,
            self.values,
            width=step.length,
        )

    def count(self) -> None:
        step = self.step
        count_emitted(step.emitted, step.accept_lens, step.slots, self.penalized, self.history)


def measure_edits(add: Callable[..., None]) -> None:
    """Of plain, listed and penalised rows beside each other's kernels."""
    for rows, length in ((1, 1), (64, 1), (1, NODES), (8, NODES), (64, NODES)):
        step = Step(rows, length, 2, CHAIN[:length])
        step.lay_out()
        step.accept_lens.fill_(min(5, length))
        for name, penalized, listed in (
            ("no edits", False, 0),
            (f"a bias of {LISTED}", False, LISTED),
            ("penalties", True, 0),
        ):
            edited = Edited(step, penalized, listed)
            add(f"edit {length} a row, {name}", rows, edited.edit, edited.moved)
        add(f"count {min(5, length)} emitted", rows, edited.count)


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
            add(f"forced acceptance, {name}", rows, partial(step.force, refused))
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
    measure_edits(add)
    return out


if __name__ == "__main__":
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": measure()}, indent=1))
