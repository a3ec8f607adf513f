"""The acceptance walk and the state it leaves, against plain Python."""

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from outrider.cython_ext.tree_walk import advance, walk

Rows = list[tuple[list[int], list[int], list[int], int]]  # tokens, parents, targets, extra tokens


def accept(tokens: list[int], parents: list[int], targets: list[int]) -> list[int]:
    """The accepted nodes of one row, the root first; none if the walk meets a bad target."""
    node, path = 0, []
    while True:
        if targets[node] < 0:
            return []
        path.append(node)
        children = [
            child
            for child in range(node + 1, len(tokens))
            if parents[child] == node and tokens[child] == targets[node]
        ]
        if not children:
            return path
        node = children[0]


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@st.composite
def row_lists(draw: st.DrawFn) -> Rows:
    rows: Rows = []
    chains = draw(st.booleans())
    for _ in range(draw(st.integers(1, 6))):
        width = draw(st.integers(0, 10))
        extra = draw(st.integers(1, 4)) if width <= 1 else 0
        token = st.integers(0, 2)
        tokens = [draw(token) for _ in range(width)]
        parents = [-1] + [n - 1 if chains else draw(st.integers(0, n - 1)) for n in range(1, width)]
        targets = [draw(st.sampled_from([0, 1, 2, 2, 1, 0, -1])) for _ in range(width)]
        rows.append((tokens, parents[:width], targets, extra))
    return rows


def run(rows: Rows, tree: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool]:
    ids, parents, targets, cu_q, node_cu = [], [], [], [0], [0]
    for tokens, row_parents, row_targets, extra in rows:
        # What stands before a row's nodes (a prompt chunk) must not matter.
        ids += [9] * extra + tokens
        parents += list(range(-1, extra - 1)) + row_parents
        targets += row_targets
        cu_q.append(len(ids))
        node_cu.append(len(targets))
    size = max(1, len(targets))
    lens, accept_cu = np.zeros(len(rows), np.int32), np.zeros(len(rows) + 1, np.int32)
    idx, emitted = np.zeros(size, np.int32), np.zeros(size, np.int32)
    total, scattered = walk(
        np.array(ids, np.int64),
        int32(parents) if tree else None,
        int32(cu_q),
        int32(node_cu),
        np.array(targets, np.int64),
        lens,
        accept_cu,
        idx,
        emitted,
    )
    assert accept_cu.tolist() == [0, *np.cumsum(lens).tolist()]
    assert total == accept_cu[-1]
    return lens, accept_cu, idx[:total], emitted[:total], scattered


@given(row_lists())
def test_walk_accepts_what_the_model_accepts(rows: Rows) -> None:
    lens, accept_cu, idx, emitted, scattered = run(rows, tree=True)
    gaps = False
    for row, (tokens, parents, targets, _) in enumerate(rows):
        path = accept(tokens, parents, targets) if tokens else []
        begin, end = accept_cu[row], accept_cu[row + 1]
        assert idx[begin:end].tolist() == path
        assert emitted[begin:end].tolist() == [targets[node] for node in path]
        gaps |= path != list(range(len(path)))
        event(f"accepted {min(len(path), 3)}")
    assert scattered == gaps
    if all(p == list(range(-1, len(p) - 1)) for _, p, _, _ in rows):
        chain = run(rows, tree=False)
        assert chain[3].tolist() == emitted.tolist()
        assert chain[0].tolist() == lens.tolist()


@given(row_lists())
def test_advance_moves_the_slots(rows: Rows) -> None:
    lens, accept_cu, _, emitted, _ = run(rows, tree=True)
    slots = list(range(len(rows)))[::-1]
    seq_lens, last, counts = int32([50] * 8), int32([-7] * 8), int32([3] * 8)
    starts = [10 * row for row in range(len(rows))]
    node_cu = np.cumsum([0] + [len(tokens) for tokens, _, _, _ in rows]).astype(np.int32)
    q_lens = [len(tokens) + extra for tokens, _, _, extra in rows]
    advance(
        int32(slots), int32(starts), int32(q_lens), node_cu, accept_cu,
        emitted if len(emitted) else int32([0]), seq_lens, last, counts,
    )  # fmt: skip
    for row, (tokens, _, _, extra) in enumerate(rows):
        slot, emits = slots[row], int(lens[row])
        if tokens and not emits:
            assert (seq_lens[slot], last[slot], counts[slot]) == (50, -7, 3)
            continue
        assert seq_lens[slot] == starts[row] + extra + emits
        assert counts[slot] == 3 + emits
        expected = emitted[accept_cu[row + 1] - 1] if emits else -7
        assert last[slot] == expected


def test_short_arrays_are_named() -> None:
    row: Rows = [([1, 2], [-1, 0], [2, 0], 0)]
    assert run(row, tree=True)[3].tolist() == [2, 0]
    with pytest.raises(ValueError, match="targets has 1 elements but at least 2"):
        walk(
            np.array([1, 2]), None, int32([0, 2]), int32([0, 2]), np.array([2]),
            int32([0]), int32([0, 0]), int32([0, 0]), int32([0, 0]),
        )  # fmt: skip
    with pytest.raises(ValueError, match="row 0: slot 3 is outside"):
        advance(
            int32([3]), int32([0]), int32([1]), int32([0, 1]), int32([0, 1]), int32([4]),
            int32([0, 0]), int32([0, 0]), int32([0, 0]),
        )  # fmt: skip


@given(row_lists(), st.booleans(), st.data())
def test_rows_emit_no_more_than_they_may(rows: Rows, tree: bool, data: st.DataObject) -> None:
    """The path without a limit, cut; an unusable target beyond the limit only ends it."""
    rows = [row for row in rows if row[0]]
    if not rows:
        return
    if not tree:
        rows = [
            (t, [n - 1 for n in range(len(t))], targets, extra) for t, _, targets, extra in rows
        ]
    limits = [data.draw(st.integers(1, 4)) for _ in rows]
    ids, parents, targets, cu_q, node_cu = [], [], [], [0], [0]
    for tokens, row_parents, row_targets, _ in rows:
        ids += tokens
        parents += row_parents
        targets += row_targets
        cu_q.append(len(ids))
        node_cu.append(len(ids))
    count, size = len(rows), len(ids)
    lens, accept_cu = np.zeros(count, np.int32), np.zeros(count + 1, np.int32)
    idx, emitted, trimmed = np.zeros(size, np.int32), np.zeros(size, np.int32), int32([-1] * count)
    walk(
        np.array(ids, np.int64), int32(parents) if tree else None, int32(cu_q), int32(node_cu),
        np.array(targets, np.int64), lens, accept_cu, idx, emitted, int32(limits), trimmed,
    )  # fmt: skip
    for row, (tokens, row_parents, row_targets, _) in enumerate(rows):
        path = accept(tokens, row_parents, row_targets)
        if not path:
            usable = accept(tokens, row_parents, [9 if t < 0 else t for t in row_targets])
            path = usable[:-1] if len(usable) > limits[row] else []
        kept = path[: limits[row]]
        begin, end = accept_cu[row], accept_cu[row + 1]
        assert idx[begin:end].tolist() == kept
        assert emitted[begin:end].tolist() == [row_targets[node] for node in kept]
        assert lens[row] == len(kept)
        assert trimmed[row] == len(path) - len(kept)
        event("trimmed" if trimmed[row] else "whole")


def test_a_limit_comes_with_room_for_what_it_takes() -> None:
    one, lens, cu, nodes, out = np.zeros(1, np.int64), *(int32([0] * 4) for _ in range(4))
    edges = int32([0, 1])
    with pytest.raises(ValueError, match="most comes with trimmed_out"):
        walk(one, None, edges, edges, one, lens, cu, nodes, out, int32([1]))
