"""External corpora: named texts, public or one tenant's, that propose beside the n-gram trie."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cython_ext.suffix_automaton import SuffixAutomaton


class CorpusError(ValueError):
    """A corpus that cannot be added; the text says why and what to do."""


class Corpus(NamedTuple):
    """One installed corpus; `tenant` None means that every request may use it."""

    name: str
    automaton: SuffixAutomaton
    tenant: str | None


class Shares(NamedTuple):
    """How the caps of R rows are split: the trie's part and each corpus' part."""

    trie: NDArray[np.int32]  # [R]
    corpora: list[tuple[Corpus, NDArray[np.int32]]]  # by name; [R], 0 where not visible


def count_tokens(documents: Sequence[NDArray[np.int32]]) -> int:
    """Tokens a corpus of these documents takes, a separator between two of them included."""
    lengths = [len(document) for document in documents if len(document)]
    return sum(lengths) + max(0, len(lengths) - 1)


def build_corpus(documents: Sequence[NDArray[np.int32]]) -> SuffixAutomaton:
    """Read tokenized documents (int32 [n] each, empty ones skipped) into a finalized automaton.

    Touches no shared state and releases the GIL: meant for a thread of the caller's. Raises
    CorpusError when there is no text or a token is negative.
    """
    automaton = SuffixAutomaton()
    for index, document in enumerate(documents):
        if not len(document):
            continue
        if automaton.tokens:
            automaton.separator()
        try:
            automaton.extend(document)
        except ValueError as error:
            raise CorpusError(f"document {index}: {error}") from error
    if not automaton.tokens:
        raise CorpusError("the corpus is empty: give at least one document with a token")
    automaton.finalize()
    return automaton


class CorpusStore:
    """The installed corpora. Names are unique over all tenants.

    `max_tokens` bounds all corpora together, separators included; `budget` is the number of draft
    nodes a row reserves for them together.
    """

    def __init__(self, max_tokens: int, budget: int) -> None:
        self.max_tokens = max_tokens
        self.budget = budget
        self._corpora: dict[str, Corpus] = {}

    def __len__(self) -> int:
        return len(self._corpora)

    @property
    def total_tokens(self) -> int:
        """Tokens of all corpora, separators included."""
        return sum(corpus.automaton.tokens for corpus in self._corpora.values())

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be added."""
        return self.max_tokens - self.total_tokens

    def admit(self, name: str, tokens: int) -> None:
        """Raise CorpusError if a corpus of this name and size could not be installed now."""
        if not name:
            raise CorpusError("the corpus has no name: give it one")
        if self.budget < 1:
            raise CorpusError(
                "external corpora are off: start with --speculative-ngram-external-sam-budget"
            )
        if name in self._corpora:
            raise CorpusError(f"a corpus named {name!r} exists: remove it first")
        if tokens > self.remaining_tokens:
            raise CorpusError(
                f"corpus {name!r} has {tokens} tokens, {self.remaining_tokens} of "
                f"{self.max_tokens} are left: remove a corpus or raise "
                "--speculative-ngram-external-corpus-max-tokens"
            )

    def install(self, name: str, automaton: SuffixAutomaton, tenant: str | None = None) -> None:
        """Propose from a built corpus from now on. Raises CorpusError as `admit` does."""
        if tenant == "":
            raise CorpusError(f"corpus {name!r}: the tenant is empty: leave it out for all tenants")
        if not automaton.finalized:
            raise CorpusError(f"corpus {name!r} is not finalized: build it with build_corpus")
        self.admit(name, automaton.tokens)
        self._corpora[name] = Corpus(name, automaton, tenant)
        self._corpora = dict(sorted(self._corpora.items()))

    def remove(self, name: str) -> bool:
        """Drop a corpus; False if there is none of this name."""
        return self._corpora.pop(name, None) is not None

    def crowding(self, name: str) -> str:
        """Which corpora propose nothing where ``name`` is in use, "" while all have a node."""
        corpus = self._corpora[name]
        owners = {each.tenant for each in self._corpora.values()} if corpus.tenant is None else ()
        groups = [
            [each.name for each in self._corpora.values() if each.tenant in (None, tenant)]
            for tenant in (corpus.tenant, *owners)
        ]
        most = max(groups, key=len)
        if len(most) <= self.budget:
            return ""
        return (
            f"{len(most)} corpora share {self.budget} draft nodes: only the first {self.budget} "
            "by name propose; remove some or raise --speculative-ngram-external-sam-budget"
        )

    def counts(self) -> dict[str, int]:
        """Tokens of every corpus by name, separators included."""
        return {name: corpus.automaton.tokens for name, corpus in self._corpora.items()}

    def split(self, tenants: Sequence[str], caps: NDArray[np.int32]) -> Shares:
        """Split the caps [R] of rows that belong to `tenants` (cache salts) over the sources.

        The corpora that a row may use share min(budget, cap) equally; what is left over goes to
        the first ones by name, one node each. The trie gets the rest of the cap.
        """
        masks = [
            (corpus, np.array([corpus.tenant in (None, tenant) for tenant in tenants], np.int32))
            for corpus in self._corpora.values()
        ]
        visible = np.zeros(len(caps), np.int32)
        for _, mask in masks:
            visible += mask
        each, left = np.divmod(np.minimum(self.budget, caps), np.maximum(visible, 1))
        trie = np.array(caps, np.int32)
        seen = np.zeros(len(caps), np.int32)
        shares: list[tuple[Corpus, NDArray[np.int32]]] = []
        for corpus, mask in masks:
            share = (mask * (each + (seen < left))).astype(np.int32)
            seen += mask
            trie -= share
            shares.append((corpus, share))
        return Shares(trie, shares)
