# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""Free list of KV pages. Ids are 1..num_pages; id 0 is the sink that padding rows write to."""

cimport cython
from libc.stdint cimport int32_t, uint8_t
from libc.stdlib cimport free, malloc

import numpy as np


@cython.final
cdef class PageAllocator:
    """LIFO stack of free pages with a flag for each page; every operation is O(pages touched).

    A fresh allocator hands out 1, 2, 3, ...; pages come back in the order that one `free` named
    them, so the order depends on the sequence of calls alone.
    """

    def __cinit__(self, int32_t num_pages):
        if not 0 < num_pages < 2147483647:
            raise ValueError(
                f"num_pages is {num_pages}: give at least 1 and at most 2147483646 pages"
            )
        self._num_pages = num_pages
        self._stack = <int32_t *>malloc(num_pages * sizeof(int32_t))
        self._is_free = <uint8_t *>malloc(num_pages + 1)
        if self._stack is NULL or self._is_free is NULL:
            raise MemoryError(f"no memory for the free list of {num_pages} pages")
        self._fill()

    def __dealloc__(self):
        free(self._stack)
        free(self._is_free)

    cdef void _fill(self) noexcept nogil:
        cdef int32_t i
        self._is_free[0] = 0
        for i in range(self._num_pages):
            self._stack[i] = self._num_pages - i
            self._is_free[i + 1] = 1
        self._top = self._num_pages

    cdef int take(self) noexcept nogil:
        """Take one page; 0 when none is left."""
        cdef int32_t page
        if self._top == 0:
            return 0
        self._top -= 1
        page = self._stack[self._top]
        self._is_free[page] = 0
        return page

    cdef bint give(self, int32_t page) noexcept nogil:
        """Free one page; False, and nothing changes, for a free page or an id out of range."""
        if not self._is_taken(page):
            return False
        self._is_free[page] = 1
        self._stack[self._top] = page
        self._top += 1
        return True

    cdef bint _is_taken(self, int32_t page) noexcept nogil:
        return 0 < page <= self._num_pages and not self._is_free[page]

    @property
    def num_pages(self):
        """All pages, free or not, the sink left out."""
        return self._num_pages

    @property
    def free_pages(self):
        """Pages that `alloc` can still hand out."""
        return self._top

    def is_free(self, int32_t page):
        """Whether this page is on the free list; ValueError for an id out of range."""
        if page < 1 or page > self._num_pages:
            raise ValueError(f"page {page} is outside 1..{self._num_pages}")
        return self._is_free[page] != 0

    def alloc(self, int32_t n):
        """Return n pages as int32 [n], or None, with nothing taken, when fewer are free."""
        cdef int32_t i
        if n < 0:
            raise ValueError(f"n is {n}: a number of pages cannot be negative")
        if n > self._top:
            return None
        out = np.empty(n, np.int32)
        cdef int32_t[::1] view = out
        for i in range(n):
            view[i] = self.take()
        return out

    def free(self, const int32_t[::1] pages not None):
        """Give pages (int32 [n]) back; the next `alloc` returns them in the order named here.

        Raises ValueError that names the page, and frees none of them, when one is out of range,
        free already, or named twice.
        """
        cdef Py_ssize_t i, j, n = pages.shape[0]
        cdef int32_t page
        for i in range(n):
            page = pages[i]
            if not self._is_taken(page):
                for j in range(i):
                    self._is_free[pages[j]] = 0
                if page < 1 or page > self._num_pages:
                    raise ValueError(f"page {page} is outside 1..{self._num_pages}: nothing freed")
                raise ValueError(f"double free of page {page}: nothing freed")
            self._is_free[page] = 1
        for i in range(n - 1, -1, -1):
            self._is_free[pages[i]] = 0
            self.give(pages[i])

    def reset(self):
        """Make every page free again, in the order of a fresh allocator."""
        self._fill()

    def check(self):
        """Raise AssertionError with the reason when the stack and the flags disagree."""
        cdef int32_t i, page, flagged = 0
        if not 0 <= self._top <= self._num_pages:
            raise AssertionError(f"{self._top} free pages of {self._num_pages}")
        seen = bytearray(self._num_pages + 1)
        cdef uint8_t[::1] mark = seen
        for i in range(self._top):
            page = self._stack[i]
            if page < 1 or page > self._num_pages:
                raise AssertionError(f"free list holds page {page}, outside 1..{self._num_pages}")
            if mark[page]:
                raise AssertionError(f"free list holds page {page} twice")
            if not self._is_free[page]:
                raise AssertionError(f"page {page} is on the free list but flagged as taken")
            mark[page] = 1
        for page in range(1, self._num_pages + 1):
            flagged += self._is_free[page]
        if flagged != self._top:
            raise AssertionError(f"{flagged} pages are flagged free but {self._top} are listed")
        if self._is_free[0]:
            raise AssertionError("the sink page 0 is flagged free")

    def corrupt_for_test(self, str kind):
        """Damage the state so that a test can see `check` notice. Kinds: see the code.

        "leak" and "count" lose a free page, "duplicate" lists one twice, "range" lists an id that
        does not exist, "flag" marks a free page as taken, "sink" frees page 0. Needs two free
        pages.
        """
        if self._top < 2:
            raise ValueError("corrupt_for_test needs at least two free pages")
        if kind == "leak":
            self._top -= 1
        elif kind == "count":
            self._top = self._num_pages + 1
        elif kind == "duplicate":
            self._stack[self._top - 1] = self._stack[self._top - 2]
        elif kind == "range":
            self._stack[self._top - 1] = self._num_pages + 1
        elif kind == "flag":
            self._is_free[self._stack[self._top - 1]] = 0
        elif kind == "sink":
            self._is_free[0] = 1
        else:
            raise ValueError(f"unknown kind of damage {kind!r}")
