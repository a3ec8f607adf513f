"""Random step plans, a plain-Python model of a step, and the compiled bookkeeping beside it."""

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.cython_ext.batch_assembly import assemble, compact_accepted
from outrider.cython_ext.step_rows import resolve_rows
from outrider.cython_ext.tree_walk import advance, walk

PREFILL, PREFILL_LAST, VERIFY = 0, 1, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Vectors = dict[str, list[int]]
Paths = list[tuple[list[int], list[int]]]  # per row: accepted nodes, emitted tokens


@dataclass
class Row:
    """A plan row: a prompt chunk that starts at ``start``, or a verify row's drafts."""

    slot: int
    kind: int
    tokens: list[int]
    parents: list[int] = field(default_factory=list)  # of drafts; 0 = the row's first token
    start: int = -1

    @property
    def length(self) -> int:
        return len(self.tokens) + (self.kind == VERIFY)

    @property
    def nodes(self) -> int:
        return self.length if self.kind == VERIFY else self.kind

    def parent_list(self) -> list[int]:
        return [-1, *self.parents] if self.kind == VERIFY else list(range(-1, self.length - 1))


@dataclass
class Slots:
    """Per-slot state in plain lists."""

    page_size: int
    seq_lens: list[int]
    last_tokens: list[int]
    out_counts: list[int]
    page_table: list[list[int]]

    def kv_slot(self, slot: int, index: int) -> int:
        return self.page_table[slot][index // self.page_size] * self.page_size + (
            index % self.page_size
        )

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        names = ("seq_lens", "last_tokens", "out_counts", "page_table")
        return {n: torch.tensor(getattr(self, n), dtype=torch.int32, device=device) for n in names}


def random_slots(rng: random.Random, count: int, columns: int, page_size: int) -> Slots:
    """State with every page mapped and room for 70 more tokens in each slot."""
    pages = list(range(1, count * columns + 1))
    rng.shuffle(pages)
    return Slots(
        page_size,
        [rng.randrange(columns * page_size - 70) for _ in range(count)],
        [rng.randrange(1000) for _ in range(count)],
        [rng.randrange(50) for _ in range(count)],
        [pages[i * columns : (i + 1) * columns] for i in range(count)],
    )


def random_drafts(rng: random.Random, slot: int, count: int, vocab: int, chain: bool) -> Row:
    parents = [i if chain else rng.choice((i, rng.randint(0, i))) for i in range(count)]
    return Row(slot, VERIFY, [rng.randrange(vocab) for _ in range(count)], parents)


def random_rows(rng: random.Random, slots: list[int], vocab: int, most: int) -> list[Row]:
    """One row a slot: chunks of both kinds, plain decoding, chains and trees."""
    rows = []
    for slot in slots:
        kind = rng.choice((PREFILL, PREFILL_LAST, VERIFY, VERIFY, VERIFY))
        if kind == VERIFY:
            count = rng.choice((0, 1, most, rng.randint(0, most)))
            rows.append(random_drafts(rng, slot, count, vocab, rng.random() < 0.4))
        else:
            chunk = [rng.randrange(vocab) for _ in range(rng.choice((1, 2, 40, 65)))]
            rows.append(Row(slot, kind, chunk, start=rng.randint(0, 5)))
    return rows


def plain_layout(rows: list[Row], slots: Slots) -> Vectors:
    """What `lay_out` must write for the real rows and tokens."""
    names = ("input_ids", "positions", "kv_slots", "tree_bits")
    out: Vectors = {name: [] for name in (*names, "kv_lens", "is_tree", "starts_before")}
    for row in rows:
        start = slots.seq_lens[row.slot] if row.kind == VERIFY else row.start
        first = [slots.last_tokens[row.slot]] if row.kind == VERIFY else []
        parents = row.parent_list()
        for i, token in enumerate(first + row.tokens):
            seen, node = [i], parents[i]
            while node >= 0:
                seen.append(node)
                node = parents[node]
            out["input_ids"].append(token)
            out["positions"].append(start + len(seen) - 1)
            out["kv_slots"].append(slots.kv_slot(row.slot, start + i))
            mask = sum(1 << node for node in seen if node < 64)
            out["tree_bits"].append(mask - (1 << 64) if mask >= 1 << 63 else mask)
        out["kv_lens"].append(start + row.length)
        out["is_tree"].append(int(parents != list(range(-1, row.length - 1))))
        out["starts_before"].append(start)
    return out


def plain_paths(rows: list[Row], targets: list[list[int]]) -> Paths:
    """Accepted nodes and emitted tokens of each row, both empty after an unusable target."""
    paths: Paths = []
    for row, wanted in zip(rows, targets, strict=True):
        path = [0] if row.nodes else []
        while path:
            fitting = [
                node
                for node in range(path[-1] + 1, row.nodes)
                if row.parents[node - 1] == path[-1] and row.tokens[node - 1] == wanted[path[-1]]
            ]
            if not fitting:
                break
            path.append(min(fitting))
        emitted = [wanted[node] for node in path]
        paths.append(([], []) if any(token < 0 for token in emitted) else (path, emitted))
    return paths


def plain_advance(rows: list[Row], starts: list[int], paths: Paths, slots: Slots) -> None:
    for row, start, (path, emitted) in zip(rows, starts, paths, strict=True):
        if row.kind == PREFILL:
            slots.seq_lens[row.slot] = start + row.length
        elif path:
            before = row.length - row.nodes
            slots.seq_lens[row.slot] = start + before + len(path)
            slots.last_tokens[row.slot] = emitted[-1]
            slots.out_counts[row.slot] += len(emitted)


@dataclass
class Inputs:
    """The padded tensors of a step: room for ``room`` rows and tokens beyond the plan's."""

    slots: torch.Tensor
    kinds: torch.Tensor
    starts: torch.Tensor
    cu_q: torch.Tensor
    node_cu: torch.Tensor
    host_tokens: torch.Tensor
    host_parents: torch.Tensor
    width: int

    def outputs(self) -> dict[str, torch.Tensor]:
        """Outputs of `lay_out`, poisoned."""
        rows, tokens, device = len(self.slots), len(self.host_tokens), self.slots.device
        wide = {"input_ids", "positions", "kv_slots", "tree_bits"}
        out = {n: torch.full((tokens,), -9, dtype=torch.int64, device=device) for n in wide}
        for name in ("kv_lens", "starts_before"):
            out[name] = torch.full((rows,), -9, dtype=torch.int32, device=device)
        return out | {"is_tree": torch.full((rows,), 9, dtype=torch.uint8, device=device)}

    def accepted(self) -> dict[str, torch.Tensor]:
        """Outputs of `verify_walk`, poisoned."""
        rows, device = len(self.slots), self.slots.device
        lens = torch.full((rows,), -9, dtype=torch.int32, device=device)
        lists = [
            torch.full((rows, self.width), -9, dtype=torch.int32, device=device) for _ in range(2)
        ]
        return {"accept_lens": lens, "tokens": lists[0], "accept_idx": lists[1]}


def make_inputs(
    rows: list[Row], device: str, room: tuple[int, int] = (0, 0), kinds: torch.dtype = torch.uint8
) -> Inputs:
    """Tensors of a plan. What no kernel may use is poisoned; padding rows name a real slot."""
    more_rows, more_tokens = room
    tokens: list[int] = []
    parents: list[int] = []
    cu_q, node_cu = [0], [0]
    for row in rows:
        verify = row.kind == VERIFY
        tokens += [-7] * verify + row.tokens
        parents += [-7, *row.parents] if verify else [-7] * row.length
        cu_q.append(len(tokens))
        node_cu.append(node_cu[-1] + row.nodes)

    def int32(values: list[int], padding: int, fill: int) -> torch.Tensor:
        return torch.tensor(values + [fill] * padding, dtype=torch.int32, device=device)

    poison_kinds = int32([row.kind for row in rows], more_rows, VERIFY)
    return Inputs(
        int32([row.slot for row in rows], more_rows, 0),
        poison_kinds.to(kinds),
        int32([row.start for row in rows], more_rows, -5),
        int32(cu_q, more_rows, cu_q[-1]),
        int32(node_cu, more_rows, node_cu[-1]),
        int32(tokens, more_tokens, -7),
        int32(parents, more_tokens, -7),
        max([1, *(row.nodes for row in rows)]),
    )


class Compiled:
    """One step of the compiled bookkeeping on its own copy of the state."""

    def __init__(self, slots: Slots) -> None:
        self.page_size = slots.page_size
        self.state = {name: tensor.numpy() for name, tensor in slots.tensors("cpu").items()}

    def lay_out(self, rows: list[Row]) -> Vectors:
        count = len(rows)
        most = count + sum(row.length for row in rows)

        def empty(size: int, dtype: type[np.generic] = np.int32) -> np.ndarray:
            return np.zeros(max(size, 1), dtype)

        def array(values: list[int]) -> np.ndarray:
            return np.array(values, np.int32)

        drafting = [row for row in rows if row.kind == VERIFY]
        self.slots = array([row.slot for row in rows])
        self.starts, self.q_lens = empty(count), empty(count)
        self.ids, self.parents = empty(most, np.int64), empty(most)
        self.node_cu, self.cu_q = empty(count + 1), empty(count + 1)
        total, _, self.branches = resolve_rows(
            self.slots,
            np.array([row.kind for row in rows], np.uint8),
            array([row.length for row in rows]),
            array([row.start for row in rows]),
            array([t for row in rows if row.kind != VERIFY for t in row.tokens]),
            array([len(row.tokens) if row.kind == VERIFY else 0 for row in rows]),
            array([t for row in drafting for t in row.tokens]),
            array([p for row in drafting for p in row.parents]),
            self.state["seq_lens"],
            self.state["last_tokens"],
            1000,
            self.starts,
            self.q_lens,
            self.ids,
            self.parents,
            self.node_cu,
            empty(most, np.int64),
            empty(count),
        )
        positions, kv_slots = empty(total, np.int64), empty(total, np.int64)
        bits, kv_lens, is_tree = empty(total, np.uint64), empty(count), empty(count, np.uint8)
        assemble(
            self.slots,
            self.q_lens,
            self.starts,
            self.parents[:total] if self.branches else None,
            self.state["page_table"],
            self.page_size,
            positions,
            kv_slots,
            empty(total),
            self.cu_q,
            kv_lens,
            bits,
            is_tree,
        )
        return {
            "input_ids": self.ids[:total].tolist(),
            "positions": positions.tolist(),
            "kv_slots": kv_slots.tolist(),
            "tree_bits": bits.view(np.int64).tolist(),
            "kv_lens": kv_lens.tolist(),
            "is_tree": is_tree.tolist(),
            "starts_before": self.starts.tolist(),
        }

    def accept(self, targets: list[int]) -> tuple[Paths, list[tuple[int, int]]]:
        """Paths of the rows and the KV moves (source, target); the state moves on."""
        nodes, rows = max(1, len(targets)), len(self.slots)
        lens, cu = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
        index, emitted = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
        total, _ = walk(
            self.ids,
            self.parents if self.branches else None,
            self.cu_q,
            self.node_cu,
            np.array(targets, np.int64),
            lens,
            cu,
            index,
            emitted,
        )
        source, target = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
        moves = compact_accepted(
            self.slots,
            self.starts,
            self.state["page_table"],
            self.page_size,
            cu,
            index[:total],
            source,
            target,
        )
        state = [self.state[name] for name in ("seq_lens", "last_tokens", "out_counts")]
        advance(self.slots, self.starts, self.q_lens, self.node_cu, cu, emitted, *state)
        paths = [
            (index[a:b].tolist(), emitted[a:b].tolist()) for a, b in itertools.pairwise(cu.tolist())
        ]
        pairs = zip(source[:moves].tolist(), target[:moves].tolist(), strict=True)
        return paths, list(pairs)
