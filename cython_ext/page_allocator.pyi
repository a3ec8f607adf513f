"""Free list of KV pages. Ids are 1..num_pages; id 0 is the sink that padding rows write to."""

from typing import Self, final

import numpy as np
from numpy.typing import NDArray

@final
class PageAllocator:
    """LIFO stack of free pages with a flag for each page."""

    def __new__(cls, num_pages: int) -> Self: ...
    @property
    def num_pages(self) -> int:
        """All pages, free or not, the sink left out."""

    @property
    def free_pages(self) -> int:
        """Pages that `alloc` can still hand out."""

    def is_free(self, page: int) -> bool:
        """Whether this page is on the free list; ValueError for an id out of range."""

    def alloc(self, n: int) -> NDArray[np.int32] | None:
        """Return n pages as int32 [n], or None, with nothing taken, when fewer are free."""

    def free(self, pages: NDArray[np.int32]) -> None:
        """Give pages (int32 [n]) back, all or, with a ValueError, none of them."""

    def reset(self) -> None:
        """Make every page free again, in the order of a fresh allocator."""

    def check(self) -> None:
        """Raise AssertionError with the reason when the stack and the flags disagree."""

    def corrupt_for_test(self, kind: str) -> None:
        """Damage the state so that a test can see `check` notice."""
