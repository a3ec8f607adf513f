"""Resolving plan rows against a plain-Python model, and every refusal."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cython_ext.step_rows import resolve_rows

PREFILL, LAST, VERIFY = 0, 1, 2
VOCAB = 50
SLOTS = 8


@dataclass
class Row:
    kind: int
    slot: int
    tokens: list[int] = field(default_factory=list)  # of the chunk, or drafts
    parents: list[int] = field(default_factory=list)
    spare: int = 0  # q_cap beyond what is used
    start: int = 0


@dataclass
class Resolved:
    starts: list[int]
    q_lens: list[int]
    ids: list[int]
    parents: list[int]
    node_cu: list[int]
    logits_index: list[int]
    depths: list[int]
    branches: bool


def model(rows: list[Row], seq_lens: list[int], last: list[int]) -> Resolved:
    """What the rows mean, in lists."""
    out = Resolved([], [], [], [], [0], [], [], False)
    for row in rows:
        if row.kind == VERIFY:
            ids, parents = [last[row.slot], *row.tokens], [-1, *row.parents]
            out.starts.append(seq_lens[row.slot])
        else:
            ids, parents = row.tokens, list(range(-1, len(row.tokens) - 1))
            out.starts.append(row.start)
        levels: list[int] = []
        for node, parent in enumerate(parents):
            levels.append(levels[parent] + 1 if parent >= 0 else 0)
            out.branches |= parent != node - 1
        base = len(out.ids)
        out.ids += ids
        out.parents += parents
        out.q_lens.append(len(ids))
        out.depths.append(max(levels) if row.kind == VERIFY else 0)
        nodes = {VERIFY: len(ids), LAST: 1, PREFILL: 0}[row.kind]
        out.logits_index += range(base + len(ids) - nodes, base + len(ids))
        out.node_cu.append(len(out.logits_index))
    return out


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def resolve(rows: list[Row], seq_lens: list[int], last: list[int], drafts: bool = True) -> Resolved:
    verify = [row for row in rows if row.kind == VERIFY]
    prompt = [token for row in rows if row.kind != VERIFY for token in row.tokens]
    caps = [len(row.tokens) + (1 if row.kind == VERIFY else 0) + row.spare for row in rows]
    size = sum(len(row.tokens) + 1 for row in rows) + 1
    starts, q_lens, depths = (np.zeros(len(rows), np.int32) for _ in range(3))
    ids, logits_index = np.zeros(size, np.int64), np.zeros(size, np.int64)
    parents_out, node_cu = np.zeros(size, np.int32), np.zeros(len(rows) + 1, np.int32)
    total, nodes, branches = resolve_rows(
        int32([row.slot for row in rows]),
        np.array([row.kind for row in rows], dtype=np.uint8),
        int32(caps),
        int32([row.start for row in rows]),
        int32(prompt),
        int32([len(row.tokens) if row.kind == VERIFY else 0 for row in rows]) if drafts else None,
        int32([token for row in verify for token in row.tokens]) if drafts else None,
        int32([parent for row in verify for parent in row.parents]) if drafts else None,
        int32(seq_lens),
        int32(last),
        VOCAB,
        starts,
        q_lens,
        ids,
        parents_out,
        node_cu,
        logits_index,
        depths,
    )
    return Resolved(
        starts.tolist(),
        q_lens.tolist(),
        ids[:total].tolist(),
        parents_out[:total].tolist(),
        node_cu.tolist(),
        logits_index[:nodes].tolist(),
        depths.tolist(),
        branches,
    )


@st.composite
def row_lists(draw: st.DrawFn) -> list[Row]:
    rows = []
    for slot in draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]:
        kind = draw(st.sampled_from([PREFILL, LAST, VERIFY]))
        least = 0 if kind == VERIFY else 1
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=least, max_size=9))
        parents = [draw(st.integers(0, node)) for node in range(len(tokens))]
        spare = draw(st.integers(0, 3)) if kind == VERIFY else 0
        start = -1 if kind == VERIFY else draw(st.integers(0, 99))
        rows.append(Row(kind, slot, tokens, parents if kind == VERIFY else [], spare, start))
    return rows


state = st.lists(st.integers(0, VOCAB - 1), min_size=SLOTS, max_size=SLOTS)


@given(row_lists(), state, state)
def test_rows_mean_what_the_model_says(
    rows: list[Row], seq_lens: list[int], last: list[int]
) -> None:
    assert resolve(rows, seq_lens, last) == model(rows, seq_lens, last)


def test_without_drafts_verify_rows_have_one_token() -> None:
    rows = [Row(VERIFY, 3, spare=4), Row(LAST, 1, [7, 8])]
    seq_lens, last = [0, 0, 0, 12, 0, 0, 0, 0], [0, 0, 0, 5, 0, 0, 0, 0]
    found = resolve(rows, seq_lens, last, drafts=False)
    assert found == model(rows, seq_lens, last)
    assert (found.ids, found.starts, found.logits_index) == ([5, 7, 8], [12, 0], [0, 2])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(VERIFY, SLOTS), "row 1: slot 8 is outside 0..7"),
        (Row(VERIFY, -1), "slot -1"),
        (Row(3, 0, [1]), "kind 3 is not a RowKind"),
        (Row(PREFILL, 0, []), "q_caps is 0, it must be at least 1"),
        (Row(PREFILL, 0, [1], spare=5), "the chunks so far need 7 tokens, the plan has 2"),
        (Row(PREFILL, 0, [VOCAB]), "token 50 is outside the vocabulary of 50"),
        (Row(VERIFY, 0, [VOCAB], [0]), "token 50 is outside the vocabulary"),
        (Row(VERIFY, 0, [-1], [0]), "token -1 is outside the vocabulary"),
        (Row(VERIFY, 0, [1, 2], [0, 2]), "node 2 has parent 2; parents precede"),
        (Row(VERIFY, 0, [1], [-1]), "node 1 has parent -1"),
        (Row(VERIFY, 0, [1, 2], [0, 1], spare=-1), "2 drafts, between 0 and 1 are allowed"),
        (Row(VERIFY, 0, [1] * 64, [0] * 64), "64 drafts, between 0 and 63"),
    ],
)
def test_broken_rows_are_named(row: Row, message: str) -> None:
    zeros = [0] * SLOTS
    with pytest.raises(ValueError, match=message):
        resolve([Row(PREFILL, 2, [1]), row], zeros, zeros)


def test_left_over_tokens_are_refused() -> None:
    one = int32([0])
    with pytest.raises(ValueError, match="take 1 prompt tokens and 0 drafts, 2 and 0 were given"):
        resolve_rows(
            one, np.array([PREFILL], np.uint8), int32([1]), one, int32([1, 2]), None, None, None,
            one, one, VOCAB, int32([0]), int32([0]), np.zeros(4, np.int64), int32([0] * 4),
            int32([0, 0]), np.zeros(4, np.int64), int32([0]),
        )  # fmt: skip


def test_short_outputs_are_named() -> None:
    one = int32([0])
    with pytest.raises(ValueError, match="input_ids_out has 1 elements but at least 3"):
        resolve_rows(
            one, np.array([PREFILL], np.uint8), int32([2]), one, int32([1, 2]), None, None, None,
            one, one, VOCAB, int32([0]), int32([0]), np.zeros(1, np.int64), int32([0] * 4),
            int32([0, 0]), np.zeros(4, np.int64), int32([0]),
        )  # fmt: skip
