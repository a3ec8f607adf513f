"""NgramTrie against a brute-force model: (namespace, path) to counts and touch times."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from outrider.cython_ext.ngram_trie import NgramTrie

from ..stateful import run_until_reached
from .draft_models import Path, Rows, Rule, TrieModel, breadth_first, i32

DEPTH: Final = 5


def ask(
    trie: NgramTrie,
    rows: Rows,
    streams: Sequence[int],
    caps: Sequence[int],
    prob: bool = False,
    low: int = 1,
    high: int = 10,
) -> None:
    trie.propose(
        i32(streams),
        i32(caps),
        int(prob),
        low,
        high,
        rows.counts,
        rows.tokens,
        rows.parents,
        rows.match,
        rows.weights,
    )


def propose(
    trie: NgramTrie, stream: int, cap: int = 11, prob: bool = False, low: int = 1, high: int = 10
) -> list[Path]:
    rows = Rows(1, cap)
    ask(trie, rows, [stream], [cap], prob, low, high)
    return rows.paths(0)


counters: Counter[str] = Counter()
TOKENS = st.integers(0, 3)


class TrieMachine(RuleBasedStateMachine):
    """Namespace k only ever reads tokens 10 * k + {0..3}, which is what isolation is told by."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 100
        self.trie = NgramTrie(self.capacity, DEPTH, slab_nodes=8)
        self.model = TrieModel(self.capacity, DEPTH)
        self.ids: dict[int, int] = {}

    def stream(self, pick: int) -> int | None:
        open_streams = sorted(self.model.text)
        return open_streams[pick % len(open_streams)] if open_streams else None

    @initialize(
        prompts=st.lists(st.lists(TOKENS, min_size=15, max_size=30), min_size=3, max_size=3)
    )
    def start(self, prompts: list[list[int]]) -> None:
        for space, prompt in zip((0, 0, 1), prompts, strict=True):
            self.open(space)
            self.extend(max(self.model.text), prompt, True)

    @rule(space=st.integers(0, 2))
    def open(self, space: int) -> None:
        if len(self.model.text) == 6:
            return
        namespace = self.trie.namespace(f"tenant {space}")
        assert namespace == self.trie.namespace(f"tenant {space}")
        self.ids[space] = namespace
        stream = self.trie.open_stream(namespace)
        assert stream not in self.model.text
        self.model.text[stream] = (space, [])

    @rule(pick=st.integers(0, 5), chance=st.integers(0, 5))
    def close(self, pick: int, chance: int) -> None:
        stream = self.stream(pick)
        if stream is not None and chance == 0:
            self.trie.close_stream(stream)
            del self.model.text[stream]

    @rule(
        pick=st.integers(0, 5),
        tokens=st.lists(TOKENS, max_size=20),
        learn=st.sampled_from([True, True, True, False]),
    )
    def extend(self, pick: int, tokens: list[int], learn: bool) -> None:
        stream = self.stream(pick)
        if stream is None:
            return
        space, text = self.model.text[stream]
        shifted = [token + 10 * space for token in tokens]
        slabs, walks = self.trie.slabs, self.trie.anchor_walks
        self.trie.extend(stream, i32(shifted), learn)
        counters["slabs"] += self.trie.slabs - slabs
        counters["walks"] += self.trie.anchor_walks - walks
        if learn:
            for token in shifted:
                self.model.push(stream, token)
        else:
            text.extend(shifted)

    @rule(tokens=st.lists(st.lists(TOKENS, max_size=3), min_size=6, max_size=6))
    def extend_all(self, tokens: list[list[int]]) -> None:
        streams = sorted(self.model.text)
        rows = [
            [token + 10 * self.model.text[stream][0] for token in row]
            for stream, row in zip(streams, tokens, strict=False)
        ]
        cu = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
        self.trie.extend_batch(i32(streams), cu, i32([t for row in rows for t in row]))
        self.model.push_rows(dict(zip(streams, rows, strict=True)))

    @rule(cap=st.integers(3, 14), low=st.integers(1, 2), more=st.integers(0, 4))
    def propose(self, cap: int, low: int, more: int) -> None:
        for prob in (False, True):
            self.propose_all(cap, Rule(prob, low, low + more, DEPTH))

    def propose_all(self, cap: int, how: Rule) -> None:
        streams = sorted(self.model.text)
        caps = [max(0, cap - row) for row in range(len(streams))]
        rows = Rows(len(streams), 11)
        walks = self.trie.anchor_walks
        ask(self.trie, rows, streams, caps, how.prob, how.low, how.high)
        counters["walks"] += self.trie.anchor_walks - walks
        for row, stream in enumerate(streams):
            cap = min(caps[row], 11)
            match, tree, anchors = self.model.propose(stream, cap, how)
            expected = breadth_first(tree)
            assert rows.paths(row) == expected
            assert rows.match[row] == match
            count = len(expected)
            assert rows.counts[row] == count <= cap
            assert rows.weights[row, :count] == pytest.approx([tree[p] for p in expected])
            assert not rows.tokens[row, count:].any()
            space = self.model.text[stream][0]
            assert all(token // 10 == space for path in expected for token in path)
            counters["full"] += count == cap > 0
            counters["merged prob" if how.prob else "merged bfs"] += anchors > 1 and count > 1
            counters["isolated"] += count > 0 and len({s for s, _ in self.model.freq}) > 1

    @rule(chance=st.integers(0, 9))
    def flush(self, chance: int) -> None:
        if chance == 0:
            self.trie.flush()
            self.model.clear()
            counters["evicted"] += self.model.evicted
            self.model.evicted = 0

    @rule()
    def recent(self) -> None:
        streams = sorted(self.model.text)
        tokens = np.zeros((len(streams), DEPTH), np.int32)
        lengths = np.zeros(len(streams), np.int32)
        self.trie.recent_tokens(i32(streams), tokens, lengths)
        for row, stream in enumerate(streams):
            expected = self.model.text[stream][1][-DEPTH:]
            assert tokens[row, : lengths[row]].tolist() == expected

    @invariant()
    def same(self) -> None:
        self.trie.check()
        assert self.trie.node_count == len(self.model.freq) <= self.trie.capacity == self.capacity
        assert self.trie.evictions == self.model.evicted
        counters["steps"] += 1
        learned = {space for space, _ in self.model.freq}
        learned |= {space for space, _ in self.model.text.values()}
        for space in learned:
            namespace = self.ids[space]
            for path in [(), *(p for s, p in self.model.freq if s == space)]:
                expected = [
                    (p[-1], self.model.freq[space, p]) for p in self.model.children(space, path)
                ]
                assert self.trie.children(namespace, path) == expected

    def teardown(self) -> None:
        counters["evicted"] += self.model.evicted


def test_the_trie_is_the_model() -> None:
    counters.clear()
    wanted = ("evicted", "walks", "slabs", "merged bfs", "merged prob", "full", "isolated")
    run_until_reached(TrieMachine, counters, wanted, examples=30, steps=40)
    assert counters["steps"] >= 1500, counters


def test_frequency_order_of_many_children_is_exact() -> None:
    """Of more than 4 children the best are kept sorted, through touches and evictions."""
    rng = np.random.default_rng(7)
    trie, model = NgramTrie(250, 2, slab_nodes=64), TrieModel(250, 2)
    stream = trie.open_stream(trie.namespace("a"))
    model.text[stream] = (0, [])
    kept = 0
    for _ in range(200):
        # Every other token is 0: node (0,) has all the others as children.
        text = [0 if i % 2 else int(rng.zipf(1.3)) % 150 + 1 for i in range(40)]
        trie.extend(stream, i32(text))
        for token in text:
            model.push(stream, token)
        trie.extend(stream, i32([0]))
        model.push(stream, 0)
        for cap, high in ((3, 3), (30, 12), (60, 50)):
            _, tree, _ = model.propose(stream, cap, Rule(True, 1, high, 2))
            assert propose(trie, stream, cap, True, 1, high) == breadth_first(tree)
        trie.check()
        kept += trie.top_lists > 0
    assert trie.evictions == model.evicted > 1000
    assert kept > 100
    trie.flush()
    assert trie.top_lists == 0


def test_a_top_list_ends_with_its_children() -> None:
    trie = NgramTrie(200, 2)
    stream = trie.open_stream(trie.namespace("a"))
    for token in range(1, 80):
        trie.extend(stream, i32([0, token]))
    trie.extend(stream, i32([0]))
    assert len(propose(trie, stream, 40, True, 1, 16)) == 16
    assert trie.top_lists == 1
    trie.check()
    trie.extend(stream, i32(list(range(1000, 1400))))
    assert trie.top_lists == 0
    trie.check()


def test_text_learned_by_one_stream_is_proposed_to_another_at_once() -> None:
    trie = NgramTrie(1000)
    namespace = trie.namespace("")
    first, second = trie.open_stream(namespace), trie.open_stream(namespace)
    trie.extend(first, i32([1, 2, 3]))
    trie.extend(second, i32([1]))
    assert propose(trie, second) == [(2,), (2, 3)]
    trie.extend(first, i32([4, 5]))
    assert propose(trie, second) == [(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5)]
    assert propose(trie, first) == []
    assert trie.max_depth == 18
    trie.close_stream(first)
    with pytest.raises(ValueError, match="not open"):
        propose(trie, first)


def test_token_zero_is_an_ordinary_token() -> None:
    trie = NgramTrie(1000)
    stream = trie.open_stream(trie.namespace(""))
    trie.extend(stream, i32([5, 0, 0, 5]))
    assert propose(trie, stream) == [(0,), (0, 0), (0, 0, 5)]


def test_siblings_come_in_rank_order() -> None:
    trie = NgramTrie(1000, 2)
    stream = trie.open_stream(trie.namespace(""))
    trie.extend(stream, i32([9, 5, 9, 3, 9, 3, 9, 7, 9, 1, 9]))
    assert propose(trie, stream, low=10) == [(1,), (7,), (3,), (5,)]
    assert propose(trie, stream, prob=True) == [(3,), (1,), (5,), (7,)]
    rows = Rows(1, 4)
    ask(trie, rows, [stream], [4], low=10)
    assert rows.weights[0].tolist() == pytest.approx([1 / 6, 1 / 6, 2 / 6, 1 / 6])
    assert propose(trie, stream, low=2, high=2) == [(1,), (7,)]
    assert propose(trie, stream, cap=3, low=10) == [(1,), (7,), (3,)]
    rows = Rows(1, 0)
    ask(trie, rows, [stream], [11])
    assert (rows.counts[0], rows.match[0]) == (0, 1)


def test_text_without_learning_is_context_only() -> None:
    trie = NgramTrie(1000)
    stream = trie.open_stream(trie.namespace(""))
    trie.extend(stream, i32([1, 2, 3, 4]))
    nodes = trie.node_count
    other = trie.open_stream(trie.namespace(""))
    trie.extend(other, i32([1, 2]), learn=False)
    assert trie.node_count == nodes
    assert propose(trie, other) == [(3,), (3, 4)]
    trie.extend(other, i32([8]))
    assert trie.children(trie.namespace(""), [1, 2]) == [(8, 1), (3, 1)]
    assert trie.children(trie.namespace(""), [2, 2]) is None


def test_flush_keeps_the_context_of_open_streams() -> None:
    trie = NgramTrie(1000, slab_nodes=16)
    namespace = trie.namespace("")
    first, second = trie.open_stream(namespace), trie.open_stream(namespace)
    trie.extend(first, i32(range(100)))
    trie.extend(second, i32([7, 8]))
    grown = trie.memory_bytes
    trie.flush()
    trie.check()
    assert (trie.node_count, trie.slabs, trie.evictions) == (0, 1, 0)
    assert trie.memory_bytes < grown
    assert propose(trie, second) == []
    trie.extend(first, i32([6, 7, 8, 9]))
    assert propose(trie, second) == [(9,)]


def test_unused_namespaces_are_dropped() -> None:
    trie = NgramTrie(20, 2)
    for tenant in range(50):
        stream = trie.open_stream(trie.namespace(f"tenant {tenant}"))
        trie.extend(stream, i32(range(40)))
        trie.close_stream(stream)
        trie.check()
    trie.namespace("last")
    assert trie.namespace_count <= 3
    silent = trie.namespace("silent")
    trie.close_stream(trie.open_stream(silent))
    trie.namespace("last")
    with pytest.raises(ValueError, match="unknown"):
        trie.open_stream(silent)
    assert trie.namespace("silent") > silent
    kept = trie.open_stream(trie.namespace("kept"))
    trie.flush()
    trie.namespace("last")
    trie.extend(kept, i32([1, 2]))
    trie.check()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("freq", 0, "freq 0"),
        ("token", 99, "does not lead to it"),
        ("parent", 2, "does not link back"),
        ("next_sibling", 1, "does not link back"),
        ("next_sibling", 500, "never handed out"),
        ("older", 1, "LRU list"),
        ("newer", 1, "LRU list"),
        ("table", 0, "does not lead to it"),
        ("used", 1, "are counted"),
    ],
)
def test_check_catches_damage(field: str, value: int, message: str) -> None:
    trie = NgramTrie(1000)
    namespace = trie.namespace("")
    trie.extend(trie.open_stream(namespace), i32([1, 2, 3, 1, 2, 4]))
    trie.check()
    path = [1, 2, 3, 1, 2, 4] if field in ("older", "newer") else [1, 2, 3]
    trie._damage(field, namespace, path, value)
    with pytest.raises(AssertionError, match=message):
        trie.check()


def test_check_catches_a_wrong_top_list() -> None:
    trie = NgramTrie(1000, 2)
    namespace = trie.namespace("")
    stream = trie.open_stream(namespace)
    for token in range(1, 80):
        trie.extend(stream, i32([0, token]))
    trie.extend(stream, i32([0]))
    propose(trie, stream, prob=True)
    trie.check()
    trie._damage("top", namespace, [0], 3)
    with pytest.raises(AssertionError, match="top list"):
        trie.check()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="max_depth"):
        NgramTrie(100, 1)
    with pytest.raises(ValueError, match="capacity"):
        NgramTrie(17)
    with pytest.raises(ValueError, match="slab_nodes"):
        NgramTrie(100, slab_nodes=48)
    trie = NgramTrie(100)
    stream = trie.open_stream(trie.namespace(""))
    with pytest.raises(ValueError, match="namespace 7"):
        trie.open_stream(7)
    with pytest.raises(ValueError, match="namespace 7"):
        trie.children(7)
    for bad in (-1, stream + 1, 10**6):
        with pytest.raises(ValueError, match="not open"):
            trie.extend(bad, i32([1]))
        with pytest.raises(ValueError, match="not open"):
            trie.close_stream(bad)
    with pytest.raises(ValueError, match=r"tokens\[1\] is -3"):
        trie.extend(stream, i32([1, -3]))
    with pytest.raises(ValueError, match="cu: shape"):
        trie.extend_batch(i32([stream]), i32([0]), i32([]))
    with pytest.raises(ValueError, match="cu: must run"):
        trie.extend_batch(i32([stream]), i32([0, 1]), i32([1, 2]))
    with pytest.raises(ValueError, match="cu: falls"):
        trie.extend_batch(
            i32([stream, trie.open_stream(trie.namespace(""))]), i32([0, 3, 2]), i32([1, 2])
        )
    with pytest.raises(ValueError, match="in two rows"):
        trie.extend_batch(i32([stream, stream]), i32([0, 1, 2]), i32([1, 2]))
    with pytest.raises(ValueError, match="breadths"):
        propose(trie, stream, low=3, high=2)
    rows = Rows(2, 3)
    with pytest.raises(ValueError, match="counts_out"):
        ask(trie, rows, [stream], [3])
    with pytest.raises(ValueError, match="caps"):
        ask(trie, rows, [stream, stream], [3])
    with pytest.raises(ValueError, match="match_type"):
        trie.propose(
            i32([]),
            i32([]),
            2,
            1,
            1,
            i32([]),
            rows.tokens[:0],
            rows.parents[:0],
            i32([]),
            rows.weights[:0],
        )
    with pytest.raises(ValueError, match="tokens_out"):
        trie.recent_tokens(i32([stream]), rows.tokens, i32([0]))
    assert trie.node_count == 0
