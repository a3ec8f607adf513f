import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from numpy.typing import NDArray

from outrider.cython_ext.batch_assembly import assemble, compact_accepted

from ..stateful import run_until_reached
from .models import Assembled, assemble_model, compact_model

REACHED: Counter[str] = Counter()
SLOTS, TABLE_WIDTH = 3, 40
FAULTS = ["page", "parent", "root", "slot", "width", "wide"]


def int32(values: list[int] | list[list[int]]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


@dataclass
class Step:
    """Inputs of one `assemble` call as lists."""

    slots: list[int] = field(default_factory=list)
    q_lens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add(self, slot: int, start: int, parents: list[int]) -> None:
        self.slots.append(slot)
        self.starts.append(start)
        self.q_lens.append(len(parents))
        self.parents += parents


def run_assemble(
    step: Step, page_table: list[list[int]], page_size: int, chains: bool = False, spare: int = 0
) -> Assembled:
    """Call `assemble` with outputs that are `spare` too long (or too short), as lists."""
    rows, total = len(step.slots), len(step.parents)
    positions, kv_slots = np.full(total + spare, -7), np.full(total + spare, -7)
    row_of_token = np.full(total + spare, -7, np.int32)
    cu_q, kv_lens = np.full(rows + 1 + spare, -7, np.int32), np.full(rows + spare, -7, np.int32)
    bits, is_tree = np.full(total + spare, 7, np.uint64), np.full(rows + spare, 7, np.uint8)
    count = assemble(
        int32(step.slots), int32(step.q_lens), int32(step.starts),
        None if chains else int32(step.parents), int32(page_table), page_size,
        positions, kv_slots, row_of_token, cu_q, kv_lens, bits, is_tree,
    )  # fmt: skip
    assert count == total
    for array, used in ((positions, total), (kv_slots, total), (row_of_token, total)):
        assert (array[used:] == -7).all()
    assert (cu_q[rows + 1 :] == -7).all()
    return Assembled(
        positions[:total].tolist(), kv_slots[:total].tolist(), row_of_token[:total].tolist(),
        cu_q[: rows + 1].tolist(), kv_lens[:rows].tolist(), bits[:total].tolist(),
        is_tree[:rows].tolist(),
    )  # fmt: skip


def run_compact(
    step: Step, page_table: list[list[int]], page_size: int, accepted: list[list[int]]
) -> list[tuple[int, int]]:
    accept_cu = np.cumsum([0, *(len(nodes) for nodes in accepted)]).astype(np.int32)
    flat = int32([node for nodes in accepted for node in nodes])
    src, dst = np.full(len(flat), -7), np.full(len(flat), -7)
    count = compact_accepted(
        int32(step.slots), int32(step.starts), int32(page_table), page_size, accept_cu, flat,
        src, dst,
    )  # fmt: skip
    assert (src[count:] == -7).all()
    return list(zip(src[:count].tolist(), dst[:count].tolist(), strict=True))


def random_row(rng: random.Random) -> list[int]:
    """Parents of one row: a tree, a short chain or a chain of about 64 tokens."""
    kind = rng.choice(["tree", "tree", "tree", "chain", "chain", "long", "empty"])
    if kind == "empty":
        return []
    if kind == "tree":
        return [-1, *(rng.randrange(i + 1) for i in range(rng.randrange(10)))]
    length = rng.randrange(1, 10) if kind == "chain" else rng.choice([64, 65, 66, 68])
    return list(range(-1, length - 1))


class KvMachine(RuleBasedStateMachine):
    """A toy model: each KV slot holds the id of the token written there.

    Steps are made from a drawn seed: drawing every parent by itself is several times slower.
    """

    @initialize(page_size=st.sampled_from([1, 2, 4, 16]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.committed: list[list[int]] = [[] for _ in range(SLOTS)]
        self.page_table = [[0] * (TABLE_WIDTH * 16 // page_size) for _ in range(SLOTS)]
        self.next_page = 1
        self.next_token = 1
        self.kv: dict[int, int] = {}

    def map_pages(self, slot: int, length: int) -> None:
        for i in range(-(-length // self.page_size)):
            if not self.page_table[slot][i]:
                self.page_table[slot][i] = self.next_page
                self.next_page += 1

    def plan(self, rng: random.Random) -> Step:
        step = Step()
        for slot in rng.sample(range(SLOTS), rng.randrange(SLOTS + 1)):
            if len(self.committed[slot]) + 70 > len(self.page_table[slot]) * self.page_size:
                self.finish(slot)
            parents = random_row(rng)
            step.add(slot, len(self.committed[slot]), parents)
            self.map_pages(slot, len(self.committed[slot]) + len(parents))
        return step

    @rule(seed=st.integers(0, 1 << 32), spare=st.integers(0, 2))
    def steps(self, seed: int, spare: int) -> None:
        rng = random.Random(seed)
        for _ in range(4):
            self.step(rng, spare)
            self.kv_reads_back()

    def step(self, rng: random.Random, spare: int) -> None:
        step = self.plan(rng)
        out = run_assemble(step, self.page_table, self.page_size, spare=spare)
        assert out == assemble_model(
            step.slots, step.q_lens, step.starts, step.parents, self.page_table, self.page_size
        )
        if not any(out.is_tree):
            assert run_assemble(step, self.page_table, self.page_size, chains=True) == out
            REACHED["all_chains"] += 1
        tokens = list(range(self.next_token, self.next_token + len(step.parents)))
        self.next_token += len(tokens)
        self.kv.update(zip(out.kv_slots, tokens, strict=True))
        self.accept(rng, step, out, tokens)

    def accept(self, rng: random.Random, step: Step, out: Assembled, tokens: list[int]) -> None:
        accepted: list[list[int]] = []
        for row, (begin, end) in enumerate(zip(out.cu_q, out.cu_q[1:], strict=False)):
            path: list[int] = []
            if end > begin:
                node = rng.randrange(end - begin)
                path = [j for j in range(end - begin) if out.tree_bits[begin + node] >> j & 1]
                assert len(path) == min(out.positions[begin + node] - step.starts[row] + 1, 64)
            accepted.append(path)
            self.committed[step.slots[row]] += [tokens[begin + node] for node in path]
            REACHED["tree"] += out.is_tree[row]
            REACHED["long_chain"] += end - begin > 64
            REACHED["empty_row"] += end == begin
        moves = run_compact(step, self.page_table, self.page_size, accepted)
        assert moves == compact_model(
            step.slots, step.starts, self.page_table, self.page_size, accepted
        )
        for src, dst in moves:
            self.kv[dst] = self.kv[src]
            REACHED["move"] += 1
            REACHED["move_across_pages"] += src // self.page_size != dst // self.page_size
        REACHED["no_move"] += bool(tokens) and not moves

    @rule(slot=st.integers(0, SLOTS - 1))
    def finish(self, slot: int) -> None:
        self.committed[slot] = []
        self.page_table[slot] = [0] * len(self.page_table[slot])
        REACHED["finish"] += 1

    @rule(seed=st.integers(0, 1 << 32))
    def refused(self, seed: int) -> None:
        rng = random.Random(seed)
        for fault in rng.sample(FAULTS, 4):
            self.refuse(rng, fault)

    def refuse(self, rng: random.Random, fault: str) -> None:
        step = self.plan(rng)
        step.add(0, len(self.committed[0]), [-1, 0, 0])
        self.map_pages(0, step.starts[-1] + 70)
        table = [list(row) for row in self.page_table]
        row, first = len(step.slots) - 1, len(step.parents) - 3
        if fault == "page":
            table[0][(step.starts[-1] + 2) // self.page_size] = 0
        elif fault == "parent":
            step.parents[first + 2] = rng.choice([-1, -2, 2, 3])
        elif fault == "root":
            step.parents[first] = rng.choice([0, 1, -2])
        elif fault == "slot":
            step.slots[-1] = rng.choice([-1, SLOTS])
        elif fault == "width":
            step.starts[-1] = len(table[0]) * self.page_size - 2
        else:
            step.q_lens[-1] = 65
            step.parents += [0] * 62
        # An earlier row of slot 0 may meet the missing page first.
        named = row if fault != "page" else min(step.slots.index(0), row)
        with pytest.raises(ValueError, match=rf"row ({named}|{row}): .*"):
            run_assemble(step, table, self.page_size)
        REACHED[f"refused_{fault}"] += 1

    @invariant()
    def kv_reads_back(self) -> None:
        for slot, tokens in enumerate(self.committed):
            pages, size = self.page_table[slot], self.page_size
            held = [self.kv[pages[i // size] * size + i % size] for i in range(len(tokens))]
            assert held == tokens


WANTED = [
    "all_chains", "tree", "long_chain", "empty_row", "move", "move_across_pages", "no_move",
    "finish", "refused_page", "refused_parent", "refused_root", "refused_slot", "refused_width",
    "refused_wide",
]  # fmt: skip


def test_against_model() -> None:
    REACHED.clear()
    run_until_reached(KvMachine, REACHED, WANTED, examples=25, steps=30)


def test_a_tree_by_hand() -> None:
    step = Step()
    step.add(1, 3, [-1, 0, 0, 1, 2])
    out = run_assemble(step, [[0, 0], [5, 9]], 4)
    assert out.positions == [3, 4, 4, 5, 5]
    assert out.kv_slots == [23, 36, 37, 38, 39]
    assert out.tree_bits == [0b1, 0b11, 0b101, 0b1011, 0b10101]
    assert (out.cu_q, out.kv_lens, out.is_tree) == ([0, 5], [8], [1])
    assert run_compact(step, [[0, 0], [5, 9]], 4, [[0, 2, 4]]) == [(37, 36), (39, 37)]


def test_a_tree_of_64_and_a_chain_of_70() -> None:
    step = Step()
    step.add(0, 0, [-1, 0, 0, *range(2, 63)])
    step.add(0, 0, list(range(-1, 69)))
    out = run_assemble(step, [list(range(1, 71))], 1)
    assert out.is_tree == [1, 0]
    assert out.tree_bits[63] == (1 << 64) - 1 - 0b10
    assert out.tree_bits[64 + 63 :] == [(1 << 64) - 1] * 7
    assert out.positions[63] == 62


BAD_STEPS = {
    r"row 1: slot 2 is outside 0\.\.1": ([0, 2], [1, 1], [0, 0]),
    "row 1: q_lens is -1": ([0, 1], [3, -1], [0, 0]),
    "row 0: starts is -4": ([0, 1], [1, 1], [-4, 0]),
    "row 1: needs room for 9 tokens but a row of page_table holds 8": ([0, 1], [1, 1], [0, 8]),
    "row 1: page_table has no page for sequence index 5": ([0, 1], [1, 1], [0, 5]),
    "q_lens has 3 elements but 2 are needed": ([0, 1], [1, 1, 0], [0, 0]),
    "starts has 1 elements but 2 are needed": ([0, 1], [1, 1], [0]),
    "parents has 2 elements but 3 are needed": ([0, 1], [1, 2], [0, 0]),
}


@pytest.mark.parametrize("message", BAD_STEPS)
def test_bad_steps_name_the_row(message: str) -> None:
    slots, q_lens, starts = BAD_STEPS[message]
    step = Step(slots, q_lens, starts, [-1, -1])
    with pytest.raises(ValueError, match=message):
        run_assemble(step, [[1, 2], [3, 0]], 4, spare=1)


def test_bad_sizes() -> None:
    step = Step([0], [1], [0], [-1])
    with pytest.raises(ValueError, match="page_size is 0"):
        run_assemble(step, [[1]], 0)
    arrays: dict[str, NDArray[np.generic]] = {
        "positions": np.zeros(1, np.int64), "kv_slots": np.zeros(1, np.int64),
        "row_of_token": np.zeros(1, np.int32), "cu_q": np.zeros(2, np.int32),
        "kv_lens": np.zeros(1, np.int32), "tree_bits": np.zeros(1, np.uint64),
        "is_tree": np.zeros(1, np.uint8),
    }  # fmt: skip
    for name in arrays:
        outs = {f"{n}_out": a[:-1] if n == name else a for n, a in arrays.items()}
        with pytest.raises(ValueError, match=f"{name}_out has . elements but at least"):
            assemble(int32([0]), int32([1]), int32([0]), None, int32([[1]]), 1, **outs)  # type: ignore[arg-type]


BAD_ACCEPTS: dict[str, tuple[list[int], list[int]]] = {
    "row 0: the first accepted index is 1": ([0, 1, 2], [1, 0]),
    r"row 1: accept_idx\[3\] is 2; the indices of a row must increase": ([0, 1, 4], [0, 0, 2, 2]),
    "row 1: accept_cu goes to 1": ([0, 2, 1, 2], [0, 1]),
    "row 0: accept_cu goes to 2": ([0, 2, 1], [0]),
    "accept_cu runs from 0 to 2": ([0, 1, 2], [0]),
    "accept_cu runs from 1 to 1": ([1, 1, 1], [0]),
    "accept_cu has 2 elements but 3 are needed": ([0, 1], [0]),
    "row 1: needs room for 9 tokens": ([0, 0, 2], [0, 8]),
    "row 1: page_table has no page for sequence index 4": ([0, 0, 2], [0, 4]),
}


@pytest.mark.parametrize("message", BAD_ACCEPTS)
def test_bad_accepts_name_the_row(message: str) -> None:
    accept_cu, accept_idx = BAD_ACCEPTS[message]
    rows = max(len(accept_cu) - 1, 2)
    out = np.zeros(9, np.int64)
    with pytest.raises(ValueError, match=message):
        compact_accepted(
            int32([0, 1, 1][:rows]), int32([0] * rows), int32([[1, 2], [3, 0]]), 4,
            int32(accept_cu), int32(accept_idx), out, out.copy(),
        )  # fmt: skip


def test_bad_compact_sizes() -> None:
    one, out = int32([0]), np.zeros(1, np.int64)
    args = (one, one, int32([[1]]))
    with pytest.raises(ValueError, match="page_size is 0"):
        compact_accepted(*args, 0, int32([0, 1]), one, out, out.copy())
    with pytest.raises(ValueError, match="starts has 0"):
        compact_accepted(one, one[:0], int32([[1]]), 1, int32([0, 1]), one, out, out.copy())
    for name in ("src_out", "dst_out"):
        outs = {"src_out": out, "dst_out": out.copy()} | {name: out[:0]}
        with pytest.raises(ValueError, match=f"{name} has 0 elements but at least 1"):
            compact_accepted(*args, 1, int32([0, 1]), one, outs["src_out"], outs["dst_out"])
