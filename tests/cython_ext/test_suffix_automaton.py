"""SuffixAutomaton against a brute-force search in the text, and merge_trees."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cython_ext.draft_tree import merge_trees
from outrider.cython_ext.suffix_automaton import SuffixAutomaton

from .draft_models import CorpusModel, Path, Rows, Rule, Tree, breadth_first, i32

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=25), min_size=1, max_size=4)


def build(documents: Sequence[Sequence[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for index, document in enumerate(documents):
        if index:
            automaton.separator()
        automaton.extend(i32(document))
    automaton.finalize()
    return automaton


def ask(
    automaton: SuffixAutomaton,
    contexts: Sequence[Sequence[int]],
    caps: Sequence[int],
    rule: Rule,
    columns: int = 11,
) -> Rows:
    rows = Rows(len(contexts), columns)
    windows = np.zeros((len(contexts), rule.depth), np.int32)
    tails = [list(context)[-rule.depth :] for context in contexts]
    for window, tail in zip(windows, tails, strict=True):
        window[: len(tail)] = tail
    automaton.propose(
        windows,
        i32([len(tail) for tail in tails]),
        i32(caps),
        int(rule.prob),
        rule.low,
        rule.high,
        rows.counts,
        rows.tokens,
        rows.parents,
        rows.match,
        rows.weights,
    )
    return rows


counters: Counter[str] = Counter()


@settings(max_examples=250)
@given(
    DOCUMENTS,
    st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=1, max_size=4),
    st.integers(0, 12),
    st.booleans(),
    st.integers(1, 2),
    st.integers(0, 4),
)
def check_against_model(
    documents: list[list[int]],
    contexts: list[list[int]],
    cap: int,
    prob: bool,
    low: int,
    more: int,
) -> None:
    automaton, model = build(documents), CorpusModel(documents)
    assert automaton.tokens == len(model.text)
    assert automaton.states <= max(2, 2 * automaton.tokens)
    rule = Rule(prob, low, low + more, 5)
    # Contexts that occur in the text match long; the random ones rarely do.
    contexts = [*contexts, *(document[: 3 + cap % 5] for document in documents), documents[-1]]
    rows = ask(automaton, contexts, [cap] * len(contexts), rule)
    for row, context in enumerate(contexts):
        match, tree, anchors = model.propose(context, min(cap, 11), rule)
        expected = breadth_first(tree)
        if cap == 0:
            assert (rows.counts[row], rows.match[row]) == (0, 0)
            continue
        assert rows.paths(row) == expected
        assert rows.match[row] == match
        count = len(expected)
        assert rows.weights[row, :count] == pytest.approx([tree[p] for p in expected])
        counters["merged prob" if prob else "merged bfs"] += anchors > 1
        counters["separated"] += match == 0 and bool(model.ends(tuple(context[-1:])))
        counters["full"] += count == min(cap, 11)
        counters["long match"] += match >= 4


def test_the_automaton_is_the_model() -> None:
    counters.clear()
    check_against_model()
    for name in ("merged bfs", "merged prob", "full", "long match"):
        assert counters[name] >= 100, counters
    assert counters["separated"] >= 20, counters


def test_nothing_is_proposed_across_documents() -> None:
    automaton = build([[1, 2], [3, 4], [1, 2, 9]])
    rule = Rule(False, 10, 10, 18)
    assert ask(automaton, [[1, 2]], [11], rule).paths(0) == [(9,)]
    assert ask(automaton, [[4]], [11], rule).paths(0) == []
    assert ask(automaton, [[3]], [11], rule).paths(0) == [(4,)]
    assert ask(automaton, [[]], [11], rule).paths(0) == []


def test_children_come_by_recency_or_frequency() -> None:
    automaton = build([[9, 5, 9, 3, 9, 3, 9, 7, 9, 1]])
    assert ask(automaton, [[9]], [4], Rule(False, 10, 10, 2)).paths(0) == [
        (1,), (7,), (3,), (5,)
    ]  # fmt: skip
    assert ask(automaton, [[9]], [4], Rule(True, 1, 4, 2)).paths(0)[0] == (3,)


def test_a_larger_text() -> None:
    rng = np.random.default_rng(3)
    text = rng.integers(0, 50, 20_000).astype(np.int32)
    automaton = SuffixAutomaton()
    before = automaton.memory_bytes
    automaton.extend(text[:9_000])
    automaton.extend(text[9_000:])
    building = automaton.memory_bytes
    automaton.finalize()
    assert automaton.finalized
    assert automaton.tokens == 20_000
    assert before < automaton.memory_bytes < building
    rows = ask(automaton, [text[5_000:5_018].tolist()], [11], Rule(False, 1, 1, 18))
    assert rows.match[0] == 18
    assert rows.paths(0)[10] == tuple(text[5_018:5_029].tolist())


def test_bad_use_is_named() -> None:
    automaton = SuffixAutomaton()
    with pytest.raises(ValueError, match=r"tokens\[1\] is -1"):
        automaton.extend(i32([0, -1]))
    assert automaton.tokens == 0
    automaton.extend(i32([1, 2, 1]))
    rule = Rule(False, 1, 2, 4)
    with pytest.raises(ValueError, match="not finalized"):
        ask(automaton, [[1]], [1], rule)
    automaton.finalize()
    for method in (automaton.finalize, automaton.separator):
        with pytest.raises(ValueError, match="is finalized"):
            method()
    with pytest.raises(ValueError, match="is finalized"):
        automaton.extend(i32([1]))
    with pytest.raises(ValueError, match="caps"):
        ask(automaton, [[1]], [1, 1], rule)
    with pytest.raises(ValueError, match="breadths"):
        ask(automaton, [[1]], [1], Rule(False, 3, 2, 4))
    rows = Rows(1, 2)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 5"):
        automaton.propose(
            np.zeros((1, 4), np.int32), i32([5]), i32([1]), 0, 1, 1,
            rows.counts, rows.tokens, rows.parents, rows.match, rows.weights,
        )  # fmt: skip


def written(trees: Sequence[Tree], columns: int) -> Rows:
    rows = Rows(len(trees), columns)
    for row, tree in enumerate(trees):
        paths = breadth_first(tree)
        rows.counts[row] = len(paths)
        for i, path in enumerate(paths):
            rows.tokens[row, i] = path[-1]
            rows.parents[row, i] = [(), *paths].index(path[:-1])
            rows.weights[row, i] = tree[path]
    return rows


def merge(caps: Sequence[int], first: Rows, other: Rows) -> None:
    merge_trees(
        i32(caps), first.counts, first.tokens, first.parents, first.weights,
        other.counts, other.tokens, other.parents, other.weights,
    )  # fmt: skip


TREES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=5)


def tree_of(paths: list[list[int]], weight: float, columns: int) -> Tree:
    tree: Tree = {(): 1.0}
    for path in paths:
        for end in range(1, len(path) + 1):
            if len(tree) <= columns:
                tree.setdefault(tuple(path[:end]), weight)
    return tree


@given(TREES, TREES, st.integers(0, 9))
def test_merged_trees_are_the_union_of_their_paths(
    left: list[list[int]], right: list[list[int]], cap: int
) -> None:
    a, b = tree_of(left, 0.5, 8), tree_of(right, 0.25, 8)
    first = written([a, a], 8)
    merge([cap, 8], first, written([b, {(): 1.0}], 8))
    expected: Tree = {(): 1.0}
    for tree in (a, b):
        for path in breadth_first(tree):
            if len(expected) <= min(cap, 8) and path[:-1] in expected:
                expected.setdefault(path, tree[path])
    if len(b) > 1:
        assert first.paths(0) == breadth_first(expected)
        weights = [expected[p] for p in breadth_first(expected)]
        assert first.weights[0, : len(weights)].tolist() == weights
    else:
        assert first.paths(0) == breadth_first(a)
    assert first.paths(1) == breadth_first(a)


def test_merge_refuses_what_is_no_tree() -> None:
    path: Path = (1,)
    first, other = written([{(): 1.0}], 3), written([{(): 1.0, path: 1.0}], 3)
    other.parents[0, 0] = 1
    with pytest.raises(ValueError, match="parents: row 0"):
        merge([3], first, other)
    other.counts[0] = 4
    with pytest.raises(ValueError, match="counts: row 0"):
        merge([3], first, other)
    with pytest.raises(ValueError, match="caps"):
        merge([3, 3], first, other)
