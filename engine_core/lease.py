"""The pages of one running request: some shared through the radix tree, the others its own."""

from itertools import pairwise
from typing import final

import numpy as np

from .ids import I32
from .prefix_cache import CachedPrefix, PrefixCache


@final
class Lease:
    """A lock on the tree's part of a request's page-table row, and ownership of the rest.

    Columns of the row, as half-open ranges, after ``publish`` of w whole pages of which the tree
    had e already, for a request that entered with a cached prefix of k pages::

        [0, k) tree    [k, e) private duplicates    [e, w) tree    [w, held) private

    It is released exactly once, and only when the last step that can touch the pages is in. A page
    of the tree that the request's first step copies stays locked until that step is in.
    """

    __slots__ = ("_cache", "_node", "_released", "_salt", "_source", "_source_node", "_tree_spans")

    def __init__(self, cache: PrefixCache, salt: str, prefix: CachedPrefix) -> None:
        """Take over the caller's locks on the prefix."""
        self._cache = cache
        self._salt = salt
        self._node = prefix.node
        self._source = prefix.source
        self._source_node = prefix.source_node
        self._tree_spans = [(0, len(prefix.pages))]
        self._released = False

    @property
    def released(self) -> bool:
        """Whether the pages were given back."""
        return self._released

    @property
    def node(self) -> int:
        """Handle of the locked tree node; 0 when nothing is locked."""
        return self._node

    @property
    def source(self) -> int:
        """The tree's page that a step in flight copies into the row's first own one; 0: none."""
        return self._source

    @property
    def tree_spans(self) -> tuple[tuple[int, int], ...]:
        """Half-open column ranges whose pages belong to the tree, ascending.

        The lock covers as many pages as the last one's end: those between are duplicates.
        """
        return tuple(self._tree_spans)

    @property
    def has_duplicates(self) -> bool:
        """Whether it owns pages that the tree holds too, which its lock keeps there."""
        return any(start > end for (_, end), (start, _) in pairwise(self._tree_spans))

    def private(self, pages: I32) -> I32:
        """Those of the row's pages (int32[held]) that this lease owns."""
        mask = np.ones(len(pages), dtype=np.bool_)
        for start, end in self._tree_spans:
            mask[start:end] = False
        return pages[mask]

    def publish(self, tokens: I32, pages: I32) -> None:
        """Give the whole pages of ``tokens`` (int32[n], all with valid KV) to the tree.

        What the tree had already stays a private duplicate, since steps in flight read it. Where
        that is all, the tree's pages are not locked: they may go when others need the room.
        """
        self._require_open()
        inserted = self._cache.insert(tokens, pages, self._salt)
        whole = len(tokens) // self._cache.page_size
        if inserted is None or inserted.existing == whole:
            return
        self._cache.lock(inserted.node)
        self._cache.unlock(self._node)
        self._node = inserted.node
        self._tree_spans.append((inserted.existing, whole))

    def end_copy(self) -> None:
        """The step that copies is in; nothing happens where there was nothing to copy."""
        if self._source_node:
            self._cache.unlock(self._source_node)
        self._source = self._source_node = 0

    def release(self, pages: I32, last_step: int, done_step: int) -> None:
        """Unlock the tree's pages and free the private ones of the row (int32[held]).

        Raises RuntimeError on a second release, and while ``last_step``, the last one that can
        touch the pages, is not among the steps up to ``done_step`` whose results are in.
        """
        self._require_open()
        if last_step > done_step:
            raise RuntimeError(
                f"lease released after step {done_step} while step {last_step} is in flight"
            )
        self._released = True
        self.end_copy()
        self._cache.unlock(self._node)
        self._cache.free(self.private(pages))

    def _require_open(self) -> None:
        if self._released:
            raise RuntimeError("lease used after its release")
