"""Radix tree and page allocator as one pool: pages that nobody locks are free to take."""

from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np

from ..cython_ext.page_allocator import PageAllocator
from ..cython_ext.radix_trie import RadixInsert, RadixMatch, RadixTrie
from .ids import I32

_NO_PAGES: I32 = np.empty(0, dtype=np.int32)


class CachedPrefix(NamedTuple):
    """What a request takes of the tree: KV of its first ``length`` tokens.

    ``pages`` int32[n] are shared, under a lock on ``node`` (0: nothing shared). ``source``: the
    page that holds the tokens after those in shared pages, to be copied into one of the request's
    own, under a lock on ``source_node``; both 0 without a copy.
    """

    length: int
    pages: I32
    node: int
    source: int = 0
    source_node: int = 0


@final
class PrefixCache:
    """The KV pages: free, cached by the tree, or owned by leases."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enabled: bool,
        freed: Callable[[I32], None] | None = None,
    ) -> None:
        """``freed``: told of all pages, int32[n], that become free."""
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTrie(page_size)
        self.page_size = page_size
        self.enabled = enabled
        self.evicted_pages = 0
        self._freed = freed

    @property
    def total(self) -> int:
        """All pages."""
        return self.allocator.num_pages

    @property
    def available(self) -> int:
        """Pages that can be had now: free ones and cached ones that nobody uses."""
        return self.allocator.free_pages + self.tree.evictable_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def match(self, tokens: I32, salt: str, limit: int) -> RadixMatch:
        """Longest cached prefix of at most ``limit`` tokens, in whole pages."""
        if not self.enabled:
            return RadixMatch(0, _NO_PAGES, 0)
        return self.tree.match(tokens, salt, limit)

    def enter(self, tokens: I32, salt: str, most: int) -> CachedPrefix:
        """Take the longest cached prefix of at most ``most`` tokens, not all; it is locked."""
        match = self.match(tokens, salt, most)
        self.lock(match.node)
        return CachedPrefix(match.length, match.pages, match.node)

    def enter_recomputing(self, tokens: I32, salt: str, most: int) -> CachedPrefix:
        """Take the longest cached prefix less its last token, which is to be computed again; what
        is left has at most ``most`` tokens.

        Nobody writes into a shared page, so what is left of the last one is to be copied.
        """
        match = self.match(tokens, salt, most + 1)
        if not match.length:
            return CachedPrefix(0, _NO_PAGES, 0)
        shared = self.match(tokens, salt, match.length - self.page_size)
        self.lock(shared.node)
        if self.page_size == 1:
            return CachedPrefix(shared.length, shared.pages, shared.node)
        self.lock(match.node)
        source = int(match.pages[-1])
        return CachedPrefix(match.length - 1, shared.pages, shared.node, source, match.node)

    def without_copy(self, prefix: CachedPrefix) -> CachedPrefix:
        """The part of a prefix that is shared; the page to copy from is unlocked."""
        if prefix.source_node:
            self.unlock(prefix.source_node)
        length = len(prefix.pages) * self.page_size
        return CachedPrefix(length, prefix.pages, prefix.node)

    def insert(self, tokens: I32, pages: I32, salt: str) -> RadixInsert | None:
        """Cache the whole pages of ``tokens``; None where there is nothing to cache."""
        if not self.enabled or len(tokens) < self.page_size:
            return None
        return self.tree.insert(tokens, pages, salt)

    def lock(self, node: int) -> None:
        """Keep a node and its ancestors from eviction; locks count."""
        self.tree.lock(node)

    def unlock(self, node: int) -> None:
        """Undo one ``lock``."""
        self.tree.unlock(node)

    def reserve(self, count: int) -> None:
        """Evict until ``count`` pages are free, or all that can be."""
        lacking = count - self.allocator.free_pages
        if lacking > 0 and self.tree.evictable_pages > 0:
            evicted = self.tree.evict(lacking)
            self.evicted_pages += len(evicted)
            self.free(evicted)

    def alloc(self, count: int) -> I32 | None:
        """Take pages, int32[count], evicting as needed; None with nothing taken if too few."""
        if count > self.available:
            return None
        self.reserve(count)
        return self.allocator.alloc(count)

    def free(self, pages: I32) -> None:
        """Give pages back that nobody owns any more."""
        if self._freed is not None:
            self._freed(pages)
        self.allocator.free(pages)

    def flush(self) -> None:
        """Forget every cached prefix. Raises RuntimeError while any is locked."""
        self.free(self.tree.reset())
