"""NGRAM: drafts from the text of all requests of a tenant, and from external corpora."""

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..cython_ext.draft_tree import merge_trees
from ..cython_ext.ngram_trie import NgramTrie
from .corpora import CorpusStore, Shares
from .drafter_spec import DrafterSpec
from .host_drafter import HostProposal

if TYPE_CHECKING:
    from .config import EngineConfig  # which holds an NgramConfig


class NgramConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and rules of the NGRAM drafter; `num_draft_tokens` counts the bonus token."""

    num_draft_tokens: int = 12
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: Literal["BFS", "PROB"] = "BFS"
    max_trie_depth: int = 18
    capacity: int = 10_000_000
    external_sam_budget: int = 0
    external_corpus_max_tokens: int = 10_000_000


class _Buffers:
    """Output arrays for up to `rows` rows, reused from call to call."""

    def __init__(self, rows: int, nodes: int) -> None:
        self.counts = np.zeros(rows, np.int32)
        self.tokens = np.zeros((rows, nodes), np.int32)
        self.parents = np.zeros((rows, nodes), np.int32)
        self.match_len = np.zeros(rows, np.int32)
        self.weights = np.zeros((rows, nodes), np.float32)

    def first(self, rows: int) -> HostProposal:
        return HostProposal(
            self.counts[:rows],
            self.tokens[:rows],
            self.parents[:rows],
            self.match_len[:rows],
            self.weights[:rows],
        )


class NgramProposer:
    """The `HostDrafter` of NGRAM: one stream of the shared trie a slot, and the corpora."""

    def __init__(self, config: NgramConfig) -> None:
        if config.num_draft_tokens < 1:
            raise ValueError(
                f"num_draft_tokens is {config.num_draft_tokens}: must be 1 or more, the bonus "
                "token counts"
            )
        if not 1 <= config.min_bfs_breadth <= config.max_bfs_breadth:
            raise ValueError(
                f"breadths are {config.min_bfs_breadth} and {config.max_bfs_breadth}: need "
                "1 <= min_bfs_breadth <= max_bfs_breadth"
            )
        self.config = config
        self.trie = NgramTrie(config.capacity, config.max_trie_depth)
        self.corpora = CorpusStore(config.external_corpus_max_tokens, config.external_sam_budget)
        self._prob = int(config.match_type == "PROB")
        self._streams = np.full(64, -1, np.int32)  # by slot, -1: the slot is not open
        self._tenants: dict[int, str] = {}
        self._resize(64)

    def _resize(self, rows: int) -> None:
        self._rows = rows
        nodes = self.config.num_draft_tokens - 1
        self._out = _Buffers(rows, nodes)
        self._other = _Buffers(rows, nodes)
        self._contexts = np.zeros((rows, self.config.max_trie_depth), np.int32)
        self._lengths = np.zeros(rows, np.int32)

    def open(
        self, slot: int, namespace: str, prompt: NDArray[np.int32], learn: bool = True
    ) -> None:
        """Start a slot's text with `prompt` [n]; `namespace` is the request's cache salt.

        `learn=False` takes the text as context without counting it again. ValueError: the slot is
        open or negative, a token is negative.
        """
        if slot in self._tenants:
            raise ValueError(f"slot {slot} is open: close it first")
        if slot < 0:
            raise ValueError(f"slot {slot} is negative")
        if slot >= len(self._streams):
            more = np.full(2 * slot + 1 - len(self._streams), -1, np.int32)
            self._streams = np.concatenate([self._streams, more])
        stream = self.trie.open_stream(self.trie.namespace(namespace))
        try:
            self.trie.extend(stream, prompt, learn)
        except ValueError:
            self.trie.close_stream(stream)
            raise
        self._streams[slot] = stream
        self._tenants[slot] = namespace

    def extend(
        self, slots: NDArray[np.int32], cu: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> None:
        """Append `tokens[cu[r]:cu[r + 1]]` to `slots[r]` and learn them: one compiled call."""
        self.trie.extend_batch(self._streams[slots], cu, tokens)

    def close(self, slot: int) -> None:
        """End a slot's text; what it taught stays. ValueError: the slot is not open."""
        if slot not in self._tenants:
            raise ValueError(f"slot {slot} is not open")
        self.trie.close_stream(int(self._streams[slot]))
        self._streams[slot] = -1
        del self._tenants[slot]

    def propose(self, slots: NDArray[np.int32], caps: NDArray[np.int32]) -> HostProposal:
        """Trees of at most `caps[r]` (and num_draft_tokens - 1) nodes; see `HostProposal`."""
        rows = len(slots)
        if rows > self._rows:
            self._resize(2 * rows)
        out = self._out.first(rows)
        streams = self._streams[slots]
        if not len(self.corpora):
            self._propose_trie(streams, caps, out)
            return out
        caps = np.clip(caps, 0, self.config.num_draft_tokens - 1)
        shares = self.corpora.split([self._tenants[int(slot)] for slot in slots], caps)
        self._propose_trie(streams, shares.trie, out)
        self._add_corpora(streams, caps, shares, out)
        return out

    def _propose_trie(
        self, streams: NDArray[np.int32], caps: NDArray[np.int32], out: HostProposal
    ) -> None:
        config = self.config
        self.trie.propose(
            streams,
            caps,
            self._prob,
            config.min_bfs_breadth,
            config.max_bfs_breadth,
            out.counts,
            out.tokens,
            out.parents,
            out.match_len,
            out.weights,
        )

    def _add_corpora(
        self,
        streams: NDArray[np.int32],
        caps: NDArray[np.int32],
        shares: Shares,
        out: HostProposal,
    ) -> None:
        rows, config = len(streams), self.config
        contexts, lengths = self._contexts[:rows], self._lengths[:rows]
        self.trie.recent_tokens(streams, contexts, lengths)
        other = self._other.first(rows)
        for corpus, share in shares.corpora:
            corpus.automaton.propose(
                contexts,
                lengths,
                share,
                self._prob,
                config.min_bfs_breadth,
                config.max_bfs_breadth,
                other.counts,
                other.tokens,
                other.parents,
                other.match_len,
                other.weights,
            )
            merge_trees(
                caps,
                out.counts,
                out.tokens,
                out.parents,
                out.weights,
                other.counts,
                other.tokens,
                other.parents,
                other.weights,
            )
            np.maximum(out.match_len, other.match_len, out=out.match_len)

    @property
    def node_count(self) -> int:
        """Nodes of the trie."""
        return self.trie.node_count

    def flush(self) -> None:
        """Forget learned text; open slots keep their context, corpora stay."""
        self.trie.flush()


def make(config: "EngineConfig", spec: DrafterSpec) -> NgramProposer:
    """The drafter of a configuration; what ``DrafterSpec.implementation`` of NGRAM names."""
    return NgramProposer(config.ngram())
