"""The block of a step against a plain writing of it, field by field."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cython_ext.step_block import fill_block, tally_rows
from outrider.engine.gpu.staging import StagingShape, StagingViews, field_edges, field_lengths
from outrider.engine_core.ids import I32, RowKind

KINDS = st.sampled_from([RowKind.PREFILL, RowKind.PREFILL_LAST, RowKind.VERIFY])


def int32(values: Any) -> I32:
    return np.array(values, dtype=np.int32)


@given(st.lists(st.tuples(KINDS, st.integers(1, 9)), max_size=7))
def test_rows_are_tallied(rows: list[tuple[RowKind, int]]) -> None:
    kinds = np.array([kind for kind, _ in rows], dtype=np.uint8)
    lengths, sums = int32([length for _, length in rows]), np.full(len(rows) + 1, -7, np.int32)
    leading, longest = tally_rows(kinds, lengths, sums)
    verifies = [kind == RowKind.VERIFY for kind, _ in rows]
    ordered = verifies == sorted(verifies, reverse=True)
    assert leading == (sum(verifies) if ordered else -1)
    assert longest == max((n for kind, n in rows if kind != RowKind.VERIFY), default=0)
    assert sums.tolist() == [0, *np.cumsum(lengths).tolist()]


def test_arrays_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="too short for 2 rows"):
        tally_rows(np.zeros(2, np.uint8), int32([1, 1]), int32([0, 0]))


class Drawn:
    """A step of R rows, T tokens, N nodes, U updates and E entries of made-up numbers."""

    def __init__(
        self, sizes: tuple[int, ...], capped: bool, leading: int | None = None, gap: int = 0
    ) -> None:
        self.rows, self.tokens, self.nodes, self.updates, self.entered = sizes
        self.leading, self.gap = self.rows if leading is None else min(leading, self.rows), gap
        rng = np.random.default_rng(sizes)

        def some(count: int, dtype: Any = np.int32) -> Any:
            return rng.integers(1, 100, count).astype(dtype)

        self.slots, self.kinds, self.starts = (
            some(self.rows),
            some(self.rows, np.uint8),
            some(self.rows),
        )
        self.caps = some(self.rows) if capped else None
        self.cu_q, self.node_cu = some(self.rows + 1), some(self.rows + 1)
        self.ids, self.parents = some(self.tokens, np.int64), some(self.tokens)
        self.index = some(self.nodes, np.int64)
        self.pages = [some(self.updates) for _ in range(3)]
        self.entries = some(3 * self.entered).reshape(-1, 3) if self.entered else None

    def fill(self, block: I32, shape: StagingShape, **changed: Any) -> None:
        values: dict[str, Any] = {
            "slots": self.slots, "kinds": self.kinds, "starts": self.starts, "caps": self.caps,
            "cu_q": self.cu_q, "node_cu": self.node_cu, "ids": self.ids, "parents": self.parents,
            "node_index": self.index, "page_slots": self.pages[0], "page_columns": self.pages[1],
            "page_ids": self.pages[2], "entries": self.entries,
        } | changed  # fmt: skip
        values = {"leading": self.leading, "gap": self.gap} | values
        fill_block(block, field_edges(shape), 99, self.tokens, self.nodes, **values)

    def expected(self, shape: StagingShape) -> dict[str, list[int]]:
        def padded(values: Any, room: int, rest: int) -> list[int]:
            found = [] if values is None else [int(value) for value in values]
            return found + [rest] * (room - len(found))

        def apart(values: Any, room: int, rest: int) -> list[int]:
            found = [rest] * self.rows if values is None else [int(value) for value in values]
            between = [rest] * self.gap
            return padded([*found[: self.leading], *between, *found[self.leading :]], room, rest)

        def sums(values: Any, room: int, rest: int) -> list[int]:
            found = [int(value) for value in values]
            cut = self.leading + 1
            between = [found[self.leading]] * self.gap
            return padded([*found[:cut], *between, *found[cut:]], room, rest)

        rows, tokens, updates, entries, _ = shape
        entered = self.entries if self.entries is not None else np.zeros((0, 3), np.int32)
        return {
            "slots": apart(self.slots, rows, 99),
            "kinds": apart(self.kinds, rows, RowKind.PREFILL),
            "starts": apart(self.starts, rows, 0),
            "caps": apart(self.caps, rows, 0),
            "cu_q": sums(self.cu_q, rows + 1, self.tokens),
            "node_cu": sums(self.node_cu, rows + 1, self.nodes),
            "tokens": padded(self.ids, tokens, 0),
            "parents": padded(self.parents, tokens, -1),
            "node_index": padded(self.index, tokens, max(0, self.tokens - 1)),
            "update_slots": padded(self.pages[0], updates, 99),
            "update_columns": padded(self.pages[1], updates, 0),
            "update_pages": padded(self.pages[2], updates, 0),
            "entry_slots": padded(entered[:, 0], entries, 99),
            "entry_lens": padded(entered[:, 1], entries, 0),
            "entry_outs": padded(entered[:, 2], entries, 0),
            "counts": [self.updates, self.entered],
        }


SIZES = st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9), *[st.integers(0, 4)] * 2)


@given(
    SIZES, st.booleans(), st.tuples(*[st.integers(0, 4)] * 4), st.integers(0, 5), st.integers(0, 3)
)
def test_fields_hold_the_step_and_padding_within_and_behind(
    sizes: tuple[int, ...], capped: bool, more: tuple[int, ...], leading: int, gap: int
) -> None:
    drawn = Drawn(sizes, capped, leading, gap)
    room = (drawn.rows + gap, max(drawn.tokens, drawn.nodes), drawn.updates, drawn.entered)
    shape = StagingShape(*(a + b for a, b in zip(room, more, strict=True)))
    block = np.full(sum(field_lengths(shape)) + 3, -5, dtype=np.int32)
    drawn.fill(block, shape)
    edges = field_edges(shape).tolist()
    parts = [block[a:b].tolist() for a, b in itertools.pairwise(edges)]
    assert dict(zip(StagingViews._fields[:16], parts, strict=True)) == drawn.expected(shape)
    assert block[edges[-1] :].tolist() == [-5] * (3 + shape.rows + 1)


SHAPE = StagingShape(2, 3, 1, 1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"slots": int32([1, 2, 3])}, "kinds: 3 are needed"),
        ({"starts": int32([1])}, "starts: 2 are needed, 1 given"),
        ({"caps": int32([1])}, "caps: 2 are needed, 1 given"),
        ({"cu_q": int32([0, 1])}, "cu_q: 3 are needed, 2 given"),
        ({"node_cu": int32([0, 1])}, "node_cu: 3 are needed, 2 given"),
        ({"ids": np.zeros(2, np.int64)}, "ids: 3 are needed, 2 given"),
        ({"parents": int32([0])}, "parents: 3 are needed, 1 given"),
        ({"node_index": np.zeros(1, np.int64)}, "node_index: 2 are needed, 1 given"),
        ({"page_slots": int32([1, 2])}, "page_columns: 2 are needed"),
        ({"page_ids": int32([])}, "page_ids: 1 are needed, 0 given"),
        ({"entries": np.zeros((2, 3), np.int32)}, "entries: 2 are needed"),
        ({"entries": np.zeros((1, 2), np.int32)}, "a slot, a length"),
        ({"gap": 1}, "the padding between them: 3 are needed"),
        ({"gap": -1}, "rows of padding follow"),
        ({"leading": 3}, "3 of 2 rows lead"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], says: str) -> None:
    block = np.zeros(sum(field_lengths(SHAPE)), dtype=np.int32)
    with pytest.raises(ValueError, match=says):
        Drawn((2, 3, 2, 1, 1), True).fill(block, SHAPE, **changed)


def test_a_block_or_edges_of_another_shape_are_refused() -> None:
    drawn, size = Drawn((2, 3, 2, 1, 1), True), int(field_edges(SHAPE)[-1])
    with pytest.raises(ValueError, match="does not hold its 16 fields"):
        drawn.fill(np.zeros(size - 1, dtype=np.int32), SHAPE)
    with pytest.raises(ValueError, match="ids: 3 are needed, 3 given and room for 2"):
        drawn.fill(np.zeros(size, dtype=np.int32), StagingShape(2, 2, 1, 1))
