"""Radix tree over token ids that says which KV pages hold a prefix."""

from typing import NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

class RadixMatch(NamedTuple):
    """Cached prefix: tokens in whole pages, their pages int32 [n], handle of the deepest node."""

    length: int
    pages: NDArray[np.int32]
    node: int

class RadixInsert(NamedTuple):
    """Leading pages that were cached before (the caller keeps its own), handle of the node."""

    existing: int
    node: int

@final
class RadixTrie:
    """Page-aligned prefix tree with a root for each namespace, locks, and LRU eviction."""

    def __new__(cls, page_size: int) -> Self: ...
    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def evictable_pages(self) -> int:
        """Pages that no lock protects."""

    @property
    def locked_pages(self) -> int:
        """Pages on the path of at least one lock."""

    @property
    def total_pages(self) -> int:
        """All pages held."""

    @property
    def node_count(self) -> int:
        """Nodes that hold pages (the namespaces' roots hold none)."""

    @property
    def namespace_count(self) -> int:
        """Namespaces that hold pages; an emptied one is forgotten."""

    def match(
        self, tokens: NDArray[np.int32], namespace: str, limit: int | None = None
    ) -> RadixMatch:
        """Find the longest cached prefix of tokens (int32 [n]), at most `limit` tokens of it."""

    def insert(
        self, tokens: NDArray[np.int32], pages: NDArray[np.int32], namespace: str
    ) -> RadixInsert:
        """Cache the whole pages of tokens (int32 [n]); pages (int32 [>= n // page_size])."""

    def lock(self, node: int) -> None:
        """Protect a node and its ancestors from eviction; locks count. Handle 0 locks nothing."""

    def unlock(self, node: int) -> None:
        """Undo one `lock` of this handle; ValueError when it has none left."""

    def evict(self, num_pages: int) -> NDArray[np.int32]:
        """Take min(num_pages, evictable_pages) least recently used pages out, int32 [k]."""

    def reset(self) -> NDArray[np.int32]:
        """Empty the tree and return all its pages; RuntimeError while any page is locked."""

    def pages(self, locked: bool = False) -> NDArray[np.int32]:
        """All pages held, or the locked ones, int32 [n]."""

    def check(self) -> None:
        """Raise AssertionError with the reason when an invariant of the tree fails."""

    def corrupt_for_test(self, kind: str) -> None:
        """Damage the state so that a test can see `check` notice."""
