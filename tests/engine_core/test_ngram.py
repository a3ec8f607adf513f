"""NgramProposer: slots, tenants, corpora beside the trie, against the models of its sources."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
)
from numpy.typing import NDArray

from outrider.engine_core.corpora import build_corpus
from outrider.engine_core.host_drafter import HostDrafter, HostProposal
from outrider.engine_core.ngram import NgramConfig, NgramProposer

from ..cython_ext.draft_models import CorpusModel, Path, Rule, Tree, TrieModel, breadth_first
from ..stateful import run_until_reached

NODES: Final = 7
DEPTH: Final = 5


def i32(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def paths_of(proposal: HostProposal, row: int) -> list[Path]:
    found: list[Path] = [()]
    for i in range(int(proposal.counts[row])):
        parent = found[proposal.parents[row, i]]
        found.append((*parent, int(proposal.tokens[row, i])))
    return found[1:]


counters: Counter[str] = Counter()
TOKENS = st.integers(0, 3)
TENANTS: Final = ("", "acme", "zeta")


class ProposerMachine(RuleBasedStateMachine):
    """Tenant k reads tokens 10 * k + {0..3} only; a private corpus has its tenant's tokens."""

    prob = False

    def __init__(self) -> None:
        super().__init__()
        self.config = NgramConfig(
            num_draft_tokens=NODES + 1,
            max_bfs_breadth=4,
            match_type="PROB" if self.prob else "BFS",
            max_trie_depth=DEPTH,
            capacity=120,
            external_sam_budget=4,
            external_corpus_max_tokens=100,
        )
        self.proposer = NgramProposer(self.config)
        self.drafter: HostDrafter = self.proposer
        self.model = TrieModel(120, DEPTH)
        self.corpora: dict[str, tuple[CorpusModel, int | None]] = {}
        self.how = Rule(self.prob, 1, 4, DEPTH)

    @initialize(
        prompts=st.lists(st.lists(TOKENS, min_size=8, max_size=25), min_size=4, max_size=4),
        text=st.lists(TOKENS, min_size=6, max_size=12),
    )
    def start(self, prompts: list[list[int]], text: list[int]) -> None:
        for slot, prompt in enumerate(prompts):
            self.open(20 * slot, slot % 3, prompt, True)
        self.add_corpus("x", None, [text])
        self.add_corpus("y", 1, [text])

    @rule(
        slot=st.integers(0, 90),
        tenant=st.integers(0, 2),
        prompt=st.lists(TOKENS, max_size=25),
        learn=st.booleans(),
    )
    def open(self, slot: int, tenant: int, prompt: list[int], learn: bool) -> None:
        tokens = [token + 10 * tenant for token in prompt]
        if slot in self.model.text or len(self.model.text) == 5:
            return
        self.drafter.open(slot, TENANTS[tenant], i32(tokens), learn)
        self.model.text[slot] = (tenant, [] if learn else tokens)
        for token in tokens if learn else ():
            self.model.push(slot, token)

    @rule(
        slots=st.lists(st.lists(TOKENS, max_size=4), min_size=5, max_size=5),
        cap=st.integers(4, 9),
    )
    def step(self, slots: list[list[int]], cap: int) -> None:
        order = sorted(self.model.text, reverse=True)
        rows = [
            [token + 10 * self.model.text[slot][0] for token in row]
            for slot, row in zip(order, slots, strict=False)
        ]
        cu = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
        self.drafter.extend(i32(order), cu, i32([t for row in rows for t in row]))
        self.model.push_rows(dict(zip(order, rows, strict=True)))
        self.propose(cap)

    @rule(
        picks=st.lists(st.integers(0, 4), min_size=1, max_size=4),
        again=st.sampled_from([True, True, False]),
    )
    def close(self, picks: list[int], again: bool) -> None:
        """Some return at once, as a retracted request does, and are not counted twice."""
        for pick in picks:
            if len(self.model.text) < 2:
                return
            slot = sorted(self.model.text)[pick % len(self.model.text)]
            self.drafter.close(slot)
            tenant, text = self.model.text.pop(slot)
            if again:
                self.drafter.open(slot, TENANTS[tenant], i32(text), learn=False)
                self.model.text[slot] = (tenant, list(text))
                counters["returned"] += 1
                self.propose(NODES)

    @rule(
        name=st.sampled_from("xyz"),
        owner=st.sampled_from([None, 1, 2]),
        text=st.lists(st.lists(TOKENS, min_size=4, max_size=12), min_size=1, max_size=2),
    )
    def add_corpus(self, name: str, owner: int | None, text: list[list[int]]) -> None:
        if name in self.corpora:
            return
        shift = 10 * owner if owner else 0
        documents = [[token + shift for token in document] for document in text]
        automaton = build_corpus([i32(document) for document in documents])
        self.proposer.corpora.install(name, automaton, TENANTS[owner] if owner else None)
        self.corpora[name] = (CorpusModel(documents), owner)

    @rule(name=st.sampled_from("xyz"), chance=st.integers(0, 4))
    def remove_corpus(self, name: str, chance: int) -> None:
        if chance == 0:
            known = self.corpora.pop(name, None) is not None
            assert self.proposer.corpora.remove(name) is known

    @rule(chance=st.integers(0, 9))
    def flush(self, chance: int) -> None:
        if chance == 0:
            self.drafter.flush()
            self.model.clear()

    @rule(cap=st.integers(0, 9))
    def propose(self, cap: int) -> None:
        order = sorted(self.model.text)
        caps = [max(0, cap - row % 2) for row in range(len(order))]
        proposal = self.drafter.propose(i32(order), i32(caps))
        for row, slot in enumerate(order):
            match, tree = self.expected(slot, min(caps[row], NODES))
            assert paths_of(proposal, row) == breadth_first(tree)
            assert proposal.match_len[row] == match
            count = int(proposal.counts[row])
            weights = [tree[path] for path in breadth_first(tree)]
            assert proposal.weights[row, :count] == pytest.approx(weights)
            assert not proposal.tokens[row, count:].any()
            tenant = self.model.text[slot][0]
            allowed = {tenant} | (
                {0} if any(o is None for _, o in self.corpora.values()) else set()
            )
            assert {token // 10 for path in breadth_first(tree) for token in path} <= allowed
            counters["proposed"] += count > 0
            counters["isolated"] += len({s for s, _ in self.model.freq}) > 1

    def expected(self, slot: int, cap: int) -> tuple[int, Tree]:
        tenant, text = self.model.text[slot]
        seen = [c for _, (c, owner) in sorted(self.corpora.items()) if owner in (None, tenant)]
        each, left = divmod(min(4, cap), len(seen)) if seen else (0, 0)
        shares = [each + (i < left) for i in range(len(seen))]
        match, tree, _ = self.model.propose(slot, cap - sum(shares), self.how)
        for corpus, share in zip(seen, shares, strict=True):
            if share == 0:
                continue
            longest, more, _ = corpus.propose(text[-DEPTH:], share, self.how)
            match = max(match, longest)
            shared = [path for path in more if path in tree and path]
            for path in breadth_first(more):
                tree.setdefault(path, more[path])
            counters["merged"] += len(more) > 1
            counters["deduped"] += bool(shared)
        return match, tree


class ProbMachine(ProposerMachine):
    prob = True


def test_the_proposer_is_its_models() -> None:
    counters.clear()
    wanted = ("proposed", "merged", "isolated", "returned", "deduped")
    for machine in (ProposerMachine, ProbMachine):
        run_until_reached(machine, counters, wanted, examples=20, steps=25)


def test_a_large_slot_number_and_many_rows() -> None:
    proposer = NgramProposer(NgramConfig(capacity=100_000))
    slots = list(range(0, 1000, 5))
    for slot in slots:
        proposer.open(slot, "", i32([1, 2, 3, 1, 2]))
    proposal = proposer.propose(i32(slots), i32([11] * len(slots)))
    assert proposal.tokens.shape == (200, 11)
    assert all(paths_of(proposal, row)[0] == (3,) for row in range(200))
    assert (proposal.match_len == 2).all()


def test_a_draft_of_the_bonus_token_alone_is_empty() -> None:
    proposer = NgramProposer(NgramConfig(num_draft_tokens=1, capacity=1000))
    proposer.open(0, "", i32([1, 2, 1]))
    proposal = proposer.propose(i32([0]), i32([11]))
    assert proposal.counts.tolist() == [0]
    assert proposal.tokens.shape == (1, 0)


def test_caps_below_zero_mean_no_draft() -> None:
    proposer = NgramProposer(NgramConfig(external_sam_budget=2, capacity=1000))
    proposer.open(0, "", i32([1, 2, 1]))
    assert proposer.propose(i32([0]), i32([-1])).counts.tolist() == [0]
    proposer.corpora.install("a", build_corpus([i32([1, 5])]))
    assert proposer.propose(i32([0]), i32([-1])).counts.tolist() == [0]
    assert paths_of(proposer.propose(i32([0]), i32([50])), 0) == [(2,), (5,), (2, 1)]


def test_the_last_tokens_of_a_closed_request_stay_learned() -> None:
    proposer = NgramProposer(NgramConfig(capacity=1000))
    proposer.open(3, "a", i32([1, 2]))
    proposer.extend(i32([3]), i32([0, 1]), i32([3]))
    proposer.close(3)
    proposer.open(3, "a", i32([1, 2]))
    proposer.open(4, "b", i32([1, 2]))
    proposal = proposer.propose(i32([3, 4]), i32([11, 11]))
    assert paths_of(proposal, 0) == [(3,)]
    assert proposal.counts.tolist() == [1, 0]


def test_bad_use_is_named() -> None:
    with pytest.raises(ValueError, match="num_draft_tokens"):
        NgramProposer(NgramConfig(num_draft_tokens=0))
    with pytest.raises(ValueError, match="breadths"):
        NgramProposer(NgramConfig(min_bfs_breadth=3, max_bfs_breadth=2))
    with pytest.raises(ValueError, match="capacity"):
        NgramProposer(NgramConfig(capacity=4))
    proposer = NgramProposer(NgramConfig(capacity=1000))
    with pytest.raises(ValueError, match="slot 2 is not open"):
        proposer.close(2)
    with pytest.raises(ValueError, match="negative"):
        proposer.open(-1, "", i32([1]))
    with pytest.raises(ValueError, match=r"tokens\[0\] is -1"):
        proposer.open(2, "", i32([-1]))
    proposer.open(2, "", i32([1]))
    with pytest.raises(ValueError, match="slot 2 is open"):
        proposer.open(2, "", i32([1]))
    with pytest.raises(ValueError, match="not open"):
        proposer.propose(i32([1]), i32([3]))
    with pytest.raises(ValueError, match="not open"):
        proposer.extend(i32([1]), i32([0, 1]), i32([3]))
