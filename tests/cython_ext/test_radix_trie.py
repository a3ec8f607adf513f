import random
from collections import Counter

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

from outrider.cython_ext.radix_trie import RadixTrie

from ..stateful import run_until_reached
from .models import PageNode, RadixTrieModel

REACHED: Counter[str] = Counter()
NAMESPACES = st.sampled_from(["", "salt", "other"])
# Two flips in a run of zeros: few different sequences, so most share a prefix with cached ones.
TOKENS = st.builds(
    lambda n, a, b: [int((i >= a) != (i >= b)) for i in range(n)],
    st.integers(0, 18),
    st.integers(0, 18),
    st.integers(0, 18),
)


def int32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


class RadixMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 3]), first=st.lists(TOKENS, max_size=4))
    def start(self, page_size: int, first: list[list[int]]) -> None:
        self.real = RadixTrie(page_size)
        self.model = RadixTrieModel(page_size)
        self.handles: list[tuple[int, PageNode]] = []
        self.locked: list[tuple[int, PageNode]] = []
        self.next_page = 1
        for tokens in first:
            for namespace in ("", "salt", "other"):
                self.insert(tokens, namespace, 0)

    def keep(self, handle: int, node: PageNode) -> None:
        assert (handle == 0) == (node.depth == 0)
        if handle:
            self.handles.append((handle, node))

    @rule(tokens=TOKENS, namespace=NAMESPACES, limit=st.none() | st.integers(0, 20))
    def match(self, tokens: list[int], namespace: str, limit: int | None) -> None:
        before = self.real.node_count
        got = self.real.match(int32(tokens), namespace, limit)
        node = self.model.match(tokens, namespace, limit)
        assert got.length == node.depth * self.real.page_size
        assert got.pages.tolist() == [at.page for at in node.path()]
        self.keep(got.node, node)
        split = self.real.node_count > before
        REACHED["match_split"] += split
        REACHED["match_split_locked"] += split and node.locks > 0
        REACHED["match_none"] += not node.depth
        REACHED["match_limited"] += limit is not None and limit < len(tokens)
        if node.depth:
            REACHED["match_some"] += 1
            REACHED[f"match_in_{namespace}"] += 1
            roots = self.model.roots.items()
            first = tuple(tokens[: self.real.page_size])
            shared = [n for n, root in roots if n != namespace and first in root.children]
            REACHED["prefix_in_two_namespaces"] += bool(shared)

    @rule(tokens=TOKENS, namespace=NAMESPACES, spare=st.integers(0, 2))
    def insert(self, tokens: list[int], namespace: str, spare: int) -> None:
        count = len(tokens) // self.real.page_size + spare
        pages = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        before = self.real.node_count
        got = self.real.insert(int32(tokens), int32(pages), namespace)
        existing, node = self.model.insert(tokens, pages, namespace)
        assert got.existing == existing
        self.keep(got.node, node)
        grown = self.real.node_count - before
        REACHED["insert_split"] += grown == 2
        REACHED["insert_new"] += existing < node.depth
        REACHED["insert_known"] += 0 < node.depth == existing
        REACHED["insert_under_lock"] += grown > 0 and any(at.locks for at in node.path())

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def run_request(self, tokens: list[int], namespace: str) -> None:
        """What a scheduler does: match and lock the prompt, cache it, lock the longer path."""
        self.match(tokens, namespace, len(tokens) - 1 if tokens else None)
        self.lock(0)
        self.insert(tokens, namespace, 0)
        self.lock(0)

    @rule(at=st.integers(0, 1000))
    def lock(self, at: int) -> None:
        if not self.handles:
            return
        handle, node = self.handles[-1 - at % min(len(self.handles), 8)]
        if not node.alive:
            for call in (self.real.lock, self.real.unlock):
                with pytest.raises(ValueError, match="stale"):
                    call(handle)
            REACHED["stale"] += 1
            return
        REACHED["lock_shared"] += node.locks > 0
        self.real.lock(handle)
        self.model.lock(node)
        self.locked.append((handle, node))
        REACHED["lock"] += 1

    @rule(at=st.integers(0, 1000))
    def unlock(self, at: int) -> None:
        if self.locked:
            handle, node = self.locked.pop(at % len(self.locked))
            self.real.unlock(handle)
            self.model.unlock(node)
            REACHED["unlock_to_zero"] += node.locks == 0
            REACHED["unlock_still_locked"] += node.locks > 0

    @rule(at=st.integers(0, 1000))
    def unlock_without_lock(self, at: int) -> None:
        candidates = [(h, n) for h, n in self.handles if n.alive and not n.own_locks]
        candidates = [(h, n) for h, n in candidates if n.locks] or candidates
        if candidates:
            handle, node = candidates[at % len(candidates)]
            with pytest.raises(ValueError, match="unlock without a lock"):
                self.real.unlock(handle)
            with pytest.raises(ValueError, match="not locked"):
                self.model.unlock(node)
            REACHED["unlock_error"] += 1
            REACHED["unlock_error_borrowed"] += node.locks > 0

    @rule(num_pages=st.integers(0, 3) | st.integers(4, 20))
    def evict(self, num_pages: int) -> None:
        nodes, evictable = self.real.node_count, self.real.evictable_pages
        got = self.real.evict(num_pages)
        assert got.dtype == np.int32
        assert got.tolist() == self.model.evict(num_pages)
        assert len(got) == min(num_pages, evictable)
        REACHED["evict"] += len(got) > 0
        REACHED["evict_node"] += self.real.node_count < nodes
        REACHED["evict_several_nodes"] += self.real.node_count < nodes - 1
        REACHED["evict_tail_only"] += len(got) > 0 and self.real.node_count == nodes
        REACHED["evict_stopped_by_locks"] += len(got) < num_pages and self.real.locked_pages > 0

    @rule(unlock_first=st.booleans(), skip=st.integers(0, 1))
    def reset(self, unlock_first: bool, skip: int) -> None:
        if self.real.locked_pages:
            with pytest.raises(RuntimeError, match="cannot reset"):
                self.real.reset()
            REACHED["reset_refused"] += 1
        if skip:
            return
        while self.locked and unlock_first:
            self.unlock(0)
        if not self.real.locked_pages:
            assert self.real.reset().tolist() == self.model.evict(self.real.total_pages + 1 << 20)
            REACHED["reset"] += 1

    @rule(tokens=TOKENS, wrong=st.sampled_from(["short", "sink", "limit"]))
    def refused(self, tokens: list[int], wrong: str) -> None:
        full = len(tokens) // self.real.page_size
        if wrong == "limit":
            with pytest.raises(ValueError, match="limit is -1"):
                self.real.match(int32(tokens), "", -1)
        elif full:
            pages = [1] * (full - 1) + ([0] if wrong == "sink" else [])
            with pytest.raises(ValueError, match=r"pages has|pages start at 1"):
                self.real.insert(int32(tokens), int32(pages), "")
            REACHED["insert_refused"] += 1

    @rule(seed=st.integers(0, 1 << 32))
    def burst(self, seed: int) -> None:
        """Steps by a plain random generator, which are cheaper than drawn ones."""
        rng = random.Random(seed)

        def tokens() -> list[int]:
            a, b = rng.randrange(18), rng.randrange(18)
            return [int((i >= a) != (i >= b)) for i in range(rng.randrange(19))]

        for _ in range(60):
            namespace, at = rng.choice(["", "salt", "other"]), rng.randrange(1000)
            match rng.randrange(16):
                case 0 | 1 | 2:
                    self.match(tokens(), namespace, rng.choice([None, rng.randrange(20)]))
                case 3 | 4:
                    self.insert(tokens(), namespace, 0)
                case 5:
                    self.run_request(tokens(), namespace)
                case 6 | 7:
                    self.lock(at)
                case 8 | 9 | 10:
                    self.unlock(at)
                    self.unlock(at + 1)
                case 11:
                    self.unlock_without_lock(at)
                case 12 | 13:
                    self.evict(rng.randrange(rng.choice([4, 20])))
                case 14:
                    self.reset(rng.random() < 0.15, 0)
                case _:
                    self.refused(tokens(), rng.choice(["short", "sink", "limit"]))
        self.same()

    @invariant()
    def same(self) -> None:
        self.real.check()
        nodes = self.model.nodes()
        assert sorted(self.real.pages().tolist()) == sorted(node.page for node in nodes)
        assert self.real.total_pages == len(nodes)
        assert self.real.locked_pages == sum(node.locks > 0 for node in nodes)
        assert self.real.evictable_pages == sum(node.locks == 0 for node in nodes)
        assert self.real.node_count == sum(node.ends_node for node in nodes)
        assert self.real.namespace_count == len(self.model.roots)


WANTED = [
    "match_split", "match_split_locked", "match_none", "match_limited", "match_some", "match_in_",
    "match_in_salt", "match_in_other", "prefix_in_two_namespaces", "insert_split", "insert_new",
    "insert_known", "insert_under_lock", "stale", "lock", "lock_shared", "unlock_to_zero",
    "unlock_still_locked", "unlock_error", "unlock_error_borrowed", "evict", "evict_node",
    "evict_several_nodes", "evict_tail_only", "evict_stopped_by_locks", "reset", "reset_refused",
    "insert_refused",
]  # fmt: skip


def test_against_model() -> None:
    REACHED.clear()
    run_until_reached(RadixMachine, REACHED, WANTED, examples=30, steps=30)


def test_many_nodes_survive_growth_of_the_tables() -> None:
    trie, model = RadixTrie(2), RadixTrieModel(2)
    rng = np.random.default_rng(0)
    for i in range(600):
        tokens = rng.integers(0, 4, 12).tolist()
        pages = list(range(6 * i + 1, 6 * i + 7))
        name = f"tenant {i % 5}"
        assert (
            trie.insert(int32(tokens), int32(pages), name).existing
            == model.insert(tokens, pages, name)[0]
        )
    trie.check()
    assert trie.node_count > 500
    assert trie.evict(900).tolist() == model.evict(900)
    trie.check()
    assert trie.reset().tolist() == model.evict(1 << 20)
    assert (trie.total_pages, trie.node_count, trie.namespace_count) == (0, 0, 0)


def test_trimming_makes_the_handle_stale_but_not_its_ancestors() -> None:
    trie = RadixTrie(2)
    deep = trie.insert(int32([1, 2, 3, 4, 5, 6, 7]), int32([11, 12, 13]), "").node
    shallow = trie.match(int32([1, 2, 9]), "").node
    assert trie.evict(1).tolist() == [13]
    with pytest.raises(ValueError, match="stale"):
        trie.lock(deep)
    trie.lock(shallow)
    assert trie.evict(5).tolist() == [12]
    assert trie.match(int32([1, 2, 3, 4]), "").pages.tolist() == [11]
    trie.unlock(shallow)
    for handle in (-1, 12345, 1 << 40):
        with pytest.raises(ValueError, match="stale"):
            trie.lock(handle)


def test_the_root_handle_locks_nothing() -> None:
    trie = RadixTrie(1)
    assert trie.match(int32([1]), "").node == 0
    trie.lock(0)
    trie.unlock(0)
    assert trie.reset().tolist() == []


DAMAGE = {
    "token": "cannot be found",
    "page": "held twice",
    "sink": "holds page 0",
    "empty": "no pages",
    "refs": "recency list but locked",
    "own": "own locks",
    "children": "children",
    "parent": "no parent",
    "recency": "more recent than its parent",
    "lost": "not in the recency list",
    "evictable": "are counted",
    "nodes": "are counted",
    "root": "belongs to no namespace",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_check_sees_damage(kind: str) -> None:
    trie = RadixTrie(1)
    trie.insert(int32([1, 2]), int32([1, 2]), "")
    trie.insert(int32([1, 2, 3, 4]), int32([1, 2, 3, 4]), "")
    trie.check()
    trie.corrupt_for_test(kind)
    with pytest.raises(AssertionError, match=DAMAGE[kind]):
        trie.check()


def test_bad_arguments() -> None:
    for page_size in (0, -3, 65537):
        with pytest.raises(ValueError, match="page_size is"):
            RadixTrie(page_size)
    trie = RadixTrie(4)
    with pytest.raises(ValueError, match="num_pages is -1"):
        trie.evict(-1)
    with pytest.raises(ValueError, match="dtype mismatch"):
        trie.match(np.zeros(4), "")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="namespace"):
        trie.match(int32([1]), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two unlocked nodes"):
        trie.corrupt_for_test("refs")
