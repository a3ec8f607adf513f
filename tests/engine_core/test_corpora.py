"""External corpora: building, caps, tenants, the split of the budget."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.cython_ext.suffix_automaton import SuffixAutomaton
from outrider.engine_core.corpora import CorpusError, CorpusStore, build_corpus, count_tokens


def docs(*documents: Sequence[int]) -> list[NDArray[np.int32]]:
    return [np.array(document, np.int32) for document in documents]


def test_documents_are_joined_by_counted_separators() -> None:
    documents = docs([1, 2], [], [3], [])
    assert count_tokens(documents) == build_corpus(documents).tokens == 4
    assert count_tokens([]) == 0


def test_a_build_runs_in_a_thread_of_the_callers() -> None:
    built: list[SuffixAutomaton] = []
    text = docs([i % 97 for i in range(30_000)])
    thread = threading.Thread(target=lambda: built.append(build_corpus(text)))
    thread.start()
    thread.join()
    assert built[0].finalized


def test_bad_documents_are_named() -> None:
    with pytest.raises(CorpusError, match="empty"):
        build_corpus(docs([], []))
    with pytest.raises(CorpusError, match=r"document 1: tokens\[2\] is -5"):
        build_corpus(docs([1], [1, 2, -5]))


def test_names_are_unique_and_tokens_are_capped() -> None:
    store = CorpusStore(max_tokens=10, budget=2)
    store.install("b", build_corpus(docs([1, 2], [3])))
    store.install("a", build_corpus(docs([1, 2, 3])), tenant="acme")
    assert store.counts() == {"a": 3, "b": 4}
    assert list(store.counts()) == ["a", "b"]
    assert (len(store), store.total_tokens, store.remaining_tokens) == (2, 7, 3)
    with pytest.raises(CorpusError, match="'a' exists"):
        store.install("a", build_corpus(docs([1])))
    with pytest.raises(CorpusError, match="'c' has 4 tokens, 3 of 10 are left"):
        store.install("c", build_corpus(docs([1, 2, 3, 4])))
    assert store.remove("b")
    assert not store.remove("b")
    store.install("c", build_corpus(docs([1, 2, 3, 4])))
    assert store.counts() == {"a": 3, "c": 4}


def test_what_could_never_propose_is_refused() -> None:
    automaton = build_corpus(docs([1]))
    with pytest.raises(CorpusError, match="sam-budget"):
        CorpusStore(max_tokens=10, budget=0).install("a", automaton)
    store = CorpusStore(max_tokens=10, budget=1)
    with pytest.raises(CorpusError, match="no name"):
        store.install("", automaton)
    with pytest.raises(CorpusError, match="tenant is empty"):
        store.install("a", automaton, tenant="")
    with pytest.raises(CorpusError, match="not finalized"):
        store.install("a", SuffixAutomaton())
    assert len(store) == 0


@given(
    st.integers(1, 11),
    st.lists(st.sampled_from([None, "a", "b"]), max_size=5),
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 11)), min_size=1),
)
def test_the_split_follows_the_rule(
    budget: int, owners: list[str | None], rows: list[tuple[str, int]]
) -> None:
    store = CorpusStore(max_tokens=100, budget=budget)
    for index, owner in enumerate(owners):
        store.install(f"{index}", build_corpus(docs([1])), owner)
    caps = np.array([cap for _, cap in rows], np.int32)
    shares = store.split([tenant for tenant, _ in rows], caps)
    for row, (tenant, cap) in enumerate(rows):
        visible = sum(owner in (None, tenant) for owner in owners)
        nodes = [0] * visible  # dealt one by one
        for node in range(min(budget, cap) if visible else 0):
            nodes[node % visible] += 1
        assert shares.trie[row] == cap - sum(nodes)
        for (corpus, share), owner in zip(shares.corpora, owners, strict=True):
            assert corpus.tenant == owner
            assert share[row] == (nodes.pop(0) if owner in (None, tenant) else 0)


def test_of_three_corpora_on_a_budget_of_two_the_first_two_propose() -> None:
    store = CorpusStore(max_tokens=100, budget=2)
    for name in "abc":
        store.install(name, build_corpus(docs([1])))
    shares = store.split([""], np.array([11], np.int32))
    assert shares.trie.tolist() == [9]
    assert [share.tolist() for _, share in shares.corpora] == [[1], [1], [0]]


def test_a_corpus_beyond_the_budget_is_told_of() -> None:
    store = CorpusStore(max_tokens=100, budget=2)
    for name, tenant in (("a", None), ("b", "acme"), ("c", "other")):
        store.install(name, build_corpus(docs([1])), tenant)
        assert store.crowding(name) == ""
    store.install("d", build_corpus(docs([1])), "acme")
    assert store.crowding("d").startswith("3 corpora share 2 draft nodes: only the first 2 by name")
    assert store.crowding("a") == store.crowding("d")
    assert store.crowding("c") == ""
