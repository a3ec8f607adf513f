"""Radix tree and page allocator as one pool: pages that nobody locks are free to take."""

from typing import final

import numpy as np

from ..cython_ext.page_allocator import PageAllocator
from ..cython_ext.radix_trie import RadixInsert, RadixMatch, RadixTrie
from .ids import I32

_NO_PAGES: I32 = np.empty(0, dtype=np.int32)


@final
class PrefixCache:
    """The KV pages: free, cached by the tree, or owned by leases."""

    def __init__(self, num_pages: int, page_size: int, enabled: bool) -> None:
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTrie(page_size)
        self.page_size = page_size
        self.enabled = enabled
        self.evicted_pages = 0

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
            self.allocator.free(evicted)

    def alloc(self, count: int) -> I32 | None:
        """Take pages, int32[count], evicting as needed; None with nothing taken if too few."""
        if count > self.available:
            return None
        self.reserve(count)
        return self.allocator.alloc(count)

    def free(self, pages: I32) -> None:
        """Give private pages back."""
        self.allocator.free(pages)

    def flush(self) -> None:
        """Forget every cached prefix. Raises RuntimeError while any is locked."""
        self.allocator.free(self.tree.reset())
