"""A step's rows against a plain model: laid out, written field by field, and read back."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cython_ext.packed_rows import PackedRows
from outrider.engine.gpu.staging import StagingShape, StagingViews, field_edges, field_lengths
from outrider.engine_core.ids import I32, RowKind

PREFILL, LAST, VERIFY = RowKind
SPARE, SLOTS, VOCAB = 99, 8, 50


def int32(values: Any) -> I32:
    return np.array(values, dtype=np.int32)


@dataclass
class Row:
    """``tokens``: of a chunk, or drafts with ``parents``; ``room``: drafts of the device."""

    kind: RowKind
    slot: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    room: int = 0
    spare: int = 0
    start: int = -1

    @property
    def count(self) -> int:
        return len(self.tokens) if self.kind == VERIFY else 0

    @property
    def length(self) -> int:
        return 1 + self.count + self.room if self.kind == VERIFY else len(self.tokens)

    @property
    def nodes(self) -> int:
        return {VERIFY: self.length, LAST: 1, PREFILL: 0}[self.kind]

    @property
    def tree(self) -> list[int]:
        if self.kind != VERIFY:
            return list(range(-1, len(self.tokens) - 1))
        return [-1, *self.parents, *[-1] * self.room]

    @property
    def depth(self) -> int:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)


@dataclass
class Step:
    rows: list[Row]
    drafts: str  # "none", "host" or "device", which may be both

    def pack(self, **changed: Any) -> PackedRows:
        rows, verify = self.rows, [row for row in self.rows if row.kind == VERIFY]
        values: dict[str, Any] = {
            "slots": int32([row.slot for row in rows]).tobytes(),
            "kinds": bytes(row.kind for row in rows),
            "q_caps": int32([row.length + row.spare for row in rows]).tobytes(),
            "starts": int32([row.start for row in rows]).tobytes(),
            "tokens": int32([t for r in rows if r.kind != VERIFY for t in r.tokens]).tobytes(),
            "max_slots": SLOTS,
            "vocab_size": VOCAB,
            "on_device": self.drafts == "device",
        }
        if self.drafts != "none":
            values |= {
                "counts": int32([row.count for row in rows]).tobytes(),
                "draft_tokens": int32([t for row in verify for t in row.tokens]).tobytes(),
                "draft_parents": int32([p for row in verify for p in row.parents]).tobytes(),
                "device_caps": int32([row.room for row in rows]).tobytes(),
            }
        return PackedRows(**values | changed)

    @property
    def verify(self) -> list[bool]:
        return [row.kind == VERIFY for row in self.rows]

    @property
    def leading(self) -> int:
        """Verify rows in front; -1 where another one follows."""
        ordered = self.verify == sorted(self.verify, reverse=True)
        return sum(self.verify) if ordered else -1

    def apart(self, values: Any, gap: int, between: Any, room: int, rest: int) -> list[int]:
        """``values`` of the rows with ``gap`` rows of padding, and padding behind."""
        found, lead = list(values), max(0, self.leading)
        found = [*found[:lead], *[between] * gap, *found[lead:]]
        return found + [rest] * (room - len(found))

    def block(
        self, shape: StagingShape, gap: int, pages: I32, entries: I32, caps: list[int], budget: int
    ) -> dict[str, list[int]]:
        rows, tokens, updates, entered, _ = shape
        lead = max(0, self.leading)
        cu_q = [0, *itertools.accumulate(row.length for row in self.rows)]
        node_cu = [0, *itertools.accumulate(row.nodes for row in self.rows)]
        ids, parents, index = list[int](), list[int](), list[int]()
        for row in self.rows:
            base = len(ids)
            ids += row.tokens if row.kind != VERIFY else [0, *row.tokens, *[0] * row.room]
            parents += row.tree
            index += range(base + row.length - row.nodes, base + row.length)

        def padded(values: Any, room: int, rest: int) -> list[int]:
            return [*values, *[rest] * (room - len(values))]

        def sums(values: list[int]) -> list[int]:
            between = [values[lead]] * gap
            found = [*values[: lead + 1], *between, *values[lead + 1 :]]
            return padded(found, rows + 1, values[-1])

        def by_row(values: Any, rest: int) -> list[int]:
            return self.apart(values, gap, rest, rows, rest)

        return {
            "slots": by_row([row.slot for row in self.rows], SPARE),
            "kinds": by_row([row.kind for row in self.rows], PREFILL),
            "starts": by_row([row.start for row in self.rows], 0),
            "caps": by_row([row.room for row in self.rows], 0),
            "cu_q": sums(cu_q),
            "node_cu": sums(node_cu),
            "tokens": padded(ids, tokens, 0),
            "parents": padded(parents, tokens, -1),
            "node_index": padded(index, tokens, max(0, len(ids) - 1)),
            "update_slots": padded(pages[0], updates, SPARE),
            "update_columns": padded(pages[1], updates, 0),
            "update_pages": padded(pages[2], updates, 0),
            "entry_slots": padded(entries[:, 0], entered, SPARE),
            "entry_lens": padded(entries[:, 1], entered, 0),
            "entry_outs": padded(entries[:, 2], entered, 0),
            "counts": [pages.shape[1], len(entries)],
            "accept_caps": padded(caps, rows, 0),
            "budget": [budget],
        }


@st.composite
def steps(draw: st.DrawFn) -> Step:
    drafts = draw(st.sampled_from(["none", "host", "device"]))
    kinds = draw(st.lists(st.sampled_from([PREFILL, LAST, VERIFY]), max_size=6))
    if draw(st.booleans()):
        kinds.sort(reverse=True)
    rows = []
    for slot, kind in zip(draw(st.permutations(range(SLOTS))), kinds, strict=False):
        if kind != VERIFY:
            tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
            rows.append(Row(kind, slot, tokens, start=draw(st.integers(0, 99))))
            continue
        count = draw(st.integers(0, 4)) if drafts != "none" else 0
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
        parents = [draw(st.integers(0, node)) for node in range(count)]
        room = draw(st.integers(0, 4)) if drafts == "device" and not count else 0
        rows.append(Row(kind, slot, tokens, parents, room, draw(st.integers(0, 2))))
    return Step(rows, drafts)


@given(steps())
def test_rows_are_laid_out(step: Step) -> None:
    packed, rows = step.pack(), step.rows
    assert packed.rows == len(rows)
    assert packed.tokens == sum(row.length for row in rows)
    assert packed.nodes == sum(row.nodes for row in rows)
    assert packed.verify_rows == step.leading
    assert packed.decode_only == all(step.verify)
    assert packed.longest == max((row.length for row in rows if row.kind != VERIFY), default=0)
    assert packed.slots.tolist() == [row.slot for row in rows]
    assert packed.kinds.tolist() == [row.kind for row in rows]
    assert packed.q_lens.tolist() == [row.length for row in rows]
    assert packed.depths.tolist() == [row.depth if row.kind == VERIFY else 0 for row in rows]
    assert np.diff(packed.node_cu).tolist() == [row.nodes for row in rows]
    assert packed.device_drafts == sum(row.room for row in rows)
    caps = packed.caps
    assert (caps is None) == (packed.device_drafts == 0)
    assert caps is None or caps.tolist() == [row.room for row in rows]
    if step.leading >= 0:
        behind = rows[step.leading :]
        assert packed.prefill_tokens == sum(row.length for row in behind)


MORE = st.tuples(*[st.integers(0, 4)] * 4)


@given(steps(), st.integers(0, 3), MORE, st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_fields_hold_the_step_and_padding_within_and_behind(
    step: Step, gap: int, more: tuple[int, ...], updates: int, entered: int, capped: bool
) -> None:
    packed, rng = step.pack(), np.random.default_rng(updates)
    pages = rng.integers(1, 100, (3, updates)).astype(np.int32)
    entries = rng.integers(1, 100, (entered, 3)).astype(np.int32)
    caps = [3] * max(0, step.leading) if capped else []
    room = (packed.rows + gap, packed.tokens, updates, entered)
    shape = StagingShape(*(a + b for a, b in zip(room, more, strict=True)))
    block = np.full(sum(field_lengths(shape)) + 3, -5, dtype=np.int32)
    edges = field_edges(shape)
    slots, columns, ids = (part.tobytes() for part in pages)
    given = entries if entered else None
    packed.fill(block, edges, SPARE, gap, slots, columns, ids, given, int32(caps).tobytes(), 7)
    parts = [block[a:b].tolist() for a, b in itertools.pairwise(edges.tolist())]
    found = dict(zip(StagingViews._fields[:18], parts, strict=True))
    assert found == step.block(shape, gap, pages, entries, caps, 7)
    assert block[edges[-1] :].tolist() == [-5] * 3


@given(steps(), st.integers(0, 3), st.integers(0, 2), *[st.booleans()] * 2, st.integers(0, 3))
def test_answers_are_those_of_the_rows(
    step: Step, gap: int, more: int, drafted: bool, trims: bool, gamma: int
) -> None:
    packed, rows, width = step.pack(), step.rows, 6
    rng = np.random.default_rng(len(rows))
    room = len(rows) + gap + more
    lens = rng.integers(0, width + 1, room).astype(np.int32)
    made, deep, cut = rng.integers(0, 9, (3, room)).astype(np.int32)
    grid, sure = (rng.integers(0, 99, (room, n)).astype(np.int32) for n in (width, gamma))
    parts = [lens, *((made, deep) if drafted else ()), grid.ravel(), sure.ravel()]
    out = np.concatenate([*parts, *([cut] if trims else [])]).astype(np.int32)
    answer = packed.read(out, room, width, gap, drafted, gamma, trims)
    lead = max(0, step.leading)
    at = [row + (gap if row >= lead else 0) for row in range(len(rows))]

    def ints(data: bytes) -> list[int]:
        return list(np.frombuffer(data, np.int32))

    assert ints(answer.lens) == [lens[p] for p in at]
    assert ints(answer.tokens) == [t for p in at for t in grid[p, : lens[p]].tolist()]
    plus = [(made[p], deep[p]) if drafted else (0, 0) for p in at]
    assert ints(answer.proposed) == [r.count + a for r, (a, _) in zip(rows, plus, strict=True)]
    depths = [(row.depth if row.kind == VERIFY else 0) for row in rows]
    assert ints(answer.depths) == [d + b for d, (_, b) in zip(depths, plus, strict=True)]
    room_of = [p for p, row in zip(at, rows, strict=True) if row.room]
    assert ints(answer.confidence) == [v for p in room_of for v in sure[p].tolist()]
    assert ints(answer.trimmed) == ([cut[p] for p in at] if trims else [])
    silent = [r for r, row in enumerate(rows) if row.nodes and not lens[at[r]]]
    assert answer.silent == silent


STEP = Step([Row(VERIFY, 1, [4], [0]), Row(LAST, 2, [5, 6], start=0)], "host")
SHAPE = StagingShape(2, 4, 1, 1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"slots": b""}, "slots: 2 are needed, 0 given"),
        ({"q_caps": bytes(4)}, "q_caps: 2 are needed, 1 given"),
        ({"starts": bytes(4)}, "starts: 2 are needed, 1 given"),
        ({"counts": bytes(4)}, "counts: 2 are needed, 1 given"),
        ({"draft_parents": b""}, "draft_parents: 1 are needed, 0 given"),
        ({"draft_tokens": None}, "counts came without draft_tokens"),
        ({"max_slots": 2}, "row 1: slot 2 is outside 0..1"),
        ({"vocab_size": 5}, "row 1: token 5 is outside the vocabulary"),
        ({"device_caps": bytes(4) + int32([1]).tobytes()}, "which has no drafter"),
        ({"device_caps": int32([1, 0]).tobytes()}, "0 for rows that have drafts"),
        ({"device_caps": int32([-1, 0]).tobytes()}, "device_caps: one a row"),
        ({"tokens": int32([5, 6, 7]).tobytes()}, "take 2 prompt tokens and 1 drafts, 3 and 1"),
    ],
)
def test_broken_steps_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        STEP.pack(**changed)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gap": 1}, "the padding between them: 3 are needed"),
        ({"gap": -1}, "cannot stand between rows"),
        ({"page_columns": b""}, "page_columns: 1 are needed"),
        ({"page_ids": b""}, "page_ids: 1 are needed, 0 given"),
        ({"page_slots": bytes(8), "page_columns": bytes(8), "page_ids": bytes(8)}, "page updates"),
        ({"entries": np.zeros((2, 3), np.int32)}, "entries: 2 are needed"),
        ({"entries": np.zeros((1, 2), np.int32)}, "a slot, a length"),
        ({"accept_caps": bytes(12)}, "accept_caps: 3 are needed"),
        ({"shape": StagingShape(1, 4, 1, 1)}, "rows and the padding"),
        ({"shape": StagingShape(2, 3, 1, 1)}, "tokens: 4 are needed, there is room for 3"),
        ({"block": np.zeros(5, np.int32)}, "does not hold its 18 fields"),
        ({"edges": np.arange(18)}, "does not hold its 18 fields"),
        ({"edges": np.array([*range(18), 16])}, "edges descend"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], says: str) -> None:
    shape = changed.pop("shape", SHAPE)
    values: dict[str, Any] = {
        "block": np.zeros(sum(field_lengths(SHAPE)), np.int32), "edges": field_edges(shape),
        "spare_slot": SPARE, "gap": 0, "page_slots": bytes(4), "page_columns": bytes(4),
        "page_ids": bytes(4), "entries": None, "accept_caps": b"", "budget": -1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=says):
        STEP.pack().fill(**values | changed)


@pytest.mark.parametrize(
    ("out", "room", "gap", "says"),
    [
        ([1, 1, 7, 7], 2, 1, "an output of 4 for 2 rows, 1 wide, does not hold 2"),
        ([1, 1, 7], 2, 0, "an output of 3 for 2 rows"),
        ([1, 2, 7, 7], 2, 0, "row 1 emits 2 tokens, 1 at most"),
        ([-1, 1, 7, 7], 2, 0, "row 0 emits -1 tokens"),
    ],
)
def test_broken_outputs_are_refused(out: list[int], room: int, gap: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        STEP.pack().read(int32(out), room, 1, gap, False, 0, False)
