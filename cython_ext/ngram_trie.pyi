from collections.abc import Iterable
from typing import final

import numpy as np
from numpy.typing import NDArray

@final
class NgramTrie:
    """All windows of up to `max_depth` tokens of every stream's text, as one trie a namespace.

    A node is a string of tokens, `freq` the times it was read since it was made. Each namespace
    has its own root, so text learned in one is never proposed in another; `capacity` bounds the
    nodes of all together. When it is reached, the leaf touched longest ago goes. A stream reads
    text token by token, each in O(max_depth). One thread at a time may use a trie.
    """

    def __new__(cls, capacity: int, max_depth: int = 18, slab_nodes: int = 131072) -> NgramTrie:
        """Nodes are allocated in slabs of `slab_nodes` (a power of two) as text arrives.

        ValueError: max_depth below 2, capacity below max_depth. MemoryError, here and in every
        method that learns.
        """

    def namespace(self, salt: str) -> int:
        """Id of the salt's namespace, made if new.

        A namespace that has lost its last stream and its last text is dropped, and its id with
        it; ids are never used again.
        """

    def open_stream(self, namespace: int) -> int:
        """A new stream with no text yet. ValueError: unknown namespace."""

    def close_stream(self, stream: int) -> None:
        """Give the stream's number back; its text stays. ValueError: not open."""

    def extend(self, stream: int, tokens: NDArray[np.int32], learn: bool = True) -> None:
        """Append `tokens` [n] to the stream and count them behind every suffix of its text.

        With `learn=False` the text only becomes the context of later tokens and proposals.
        ValueError: stream not open, negative token; nothing is appended then.
        """

    def extend_batch(
        self, streams: NDArray[np.int32], cu: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> None:
        """Append `tokens[cu[r]:cu[r + 1]]` to `streams[r]`, each row's first token before any
        row's second. ValueError as `extend`, for a stream in two rows, and when `cu` does not
        cover `tokens`; nothing is appended then.
        """

    def recent_tokens(
        self,
        streams: NDArray[np.int32],
        tokens_out: NDArray[np.int32],
        lengths_out: NDArray[np.int32],
    ) -> None:
        """Write each stream's last tokens [R, max_depth], oldest first, and how many [R]."""

    def propose(
        self,
        streams: NDArray[np.int32],
        caps: NDArray[np.int32],
        match_type: int,
        min_breadth: int,
        max_breadth: int,
        counts_out: NDArray[np.int32],
        tokens_out: NDArray[np.int32],
        parents_out: NDArray[np.int32],
        match_len_out: NDArray[np.int32],
        weights_out: NDArray[np.float32],
    ) -> None:
        """Write a draft tree of at most `caps[r]` nodes for every stream.

        `match_type` 0 (BFS) walks continuations newest first, 1 (PROB) most frequent first.
        `counts_out` [R]; `tokens_out`, `parents_out`, `weights_out` [R, N]: nodes breadth-first,
        siblings in rank order, zeros behind them. Parent 0 is the bonus token, which is not a
        node; parent i + 1 is node i. `match_len_out` [R]: tokens of the longest suffix that has
        continuations, 0 if none. `weights_out` estimates acceptance: freq of the child / freq of
        its parent, at most 1, multiplied along the path. ValueError: stream not open, shapes,
        breadths.
        """

    def flush(self) -> None:
        """Forget all text; streams stay open and keep their last tokens as context."""

    def children(self, namespace: int, path: Iterable[int] = ()) -> list[tuple[int, int]] | None:
        """(token, freq) of the continuations of `path`, newest first; None if it is not held."""

    @property
    def max_depth(self) -> int:
        """Tokens of the longest path."""

    @property
    def node_count(self) -> int:
        """Nodes in use, the namespaces' roots not counted."""

    @property
    def namespace_count(self) -> int:
        """Namespaces that have text or were not dropped yet."""

    @property
    def capacity(self) -> int:
        """Largest node_count."""

    @property
    def evictions(self) -> int:
        """Nodes evicted since the trie was made or flushed."""

    @property
    def anchor_walks(self) -> int:
        """Anchors that were missing or stale and were looked up from the root again."""

    @property
    def slabs(self) -> int:
        """Slabs allocated."""

    @property
    def top_lists(self) -> int:
        """Nodes with many children that keep their most frequent ones sorted."""

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated for nodes, table, top lists and streams."""

    def check(self) -> None:
        """AssertionError says which invariant is broken. Visits every node."""

    def _damage(self, field: str, namespace: int, path: Iterable[int], value: int) -> None: ...
