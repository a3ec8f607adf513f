"""The fake worker with a drafter that keeps a window: it asserts what is read of the draft's pool.

Written from the plan's contract alone. Each slot of the pool keeps the hash of the prefix that was
injected there, or rubbish: of a block, of a rejected draft, or of another request since.
"""

from collections import Counter

import numpy as np

from outrider.engine_core.ids import i32
from outrider.engine_core.plan import StepPlan

from .core_fixtures import device_oracle
from .fake_worker import GARBAGE, FakeWorker, Slot


class WindowWorker(FakeWorker):
    """Drafts of up to ``width`` - 1 tokens for rows that have draft KV; ``window`` as they see it.

    ``seen`` counts rows by how they found their window: whole, short or without any.
    """

    def __init__(self, pool_pages: int, window: int, width: int, **fields: int) -> None:
        super().__init__(device_drafter=self._draft, **fields)  # type: ignore[arg-type]
        self.width = width
        self.window = window
        self.size = self.info().page_size
        self.table = np.zeros(self.info().num_pages + 1, dtype=np.int64)
        self.pool = np.full(pool_pages * self.size, GARBAGE, dtype=np.int64)
        self.lows = np.zeros(self.info().max_slots, dtype=np.int64)
        self.seen: Counter[str] = Counter()
        self.moved = 0
        self._oracle = device_oracle()

    def _enter(self, plan: StepPlan) -> None:
        super()._enter(plan)
        pages, drafts = i32(plan.window_pages), i32(plan.window_drafts)
        assert len(set(pages.tolist())) == len(pages), "a page moves twice"
        self.table[pages] = drafts
        self.moved += len(pages)
        owned = self.table[self.table > 0].tolist()
        assert len(set(owned)) == len(owned), "a draft page has two owners"
        assert all(page * self.size < len(self.pool) for page in owned)
        assert self.table[0] == 0
        self.lows[i32(plan.slots)] = i32(plan.window_lows)

    def _draft(self, slot: Slot, cap: int) -> list[int]:
        """The drafts, after a look at all that the draft would read."""
        length, low = len(slot.tokens) - 1, int(self.lows[slot.init.slot])
        aligned = max(length - self.window, 0) // self.size * self.size
        start = max(aligned, -(-low // self.size) * self.size)
        if start > length:
            self.seen["none"] += 1
            return []
        self.seen["whole" if start == aligned else "short"] += 1
        for i in range(start, length):
            draft = int(self.table[slot.pages[i // self.size]])
            assert draft, f"position {i} of {length} has no draft page"
            assert self.pool[draft * self.size + i % self.size] == slot.hashes[i], (
                f"position {i} of {length} holds another prefix"
            )
        for i in range(length, length + min(cap, self.width - 1) + 1):
            assert self.table[slot.pages[i // self.size]], "the block has no draft page"
            self._put(slot, i, GARBAGE)
        return self._oracle(slot, cap)

    def _align(self, slot: Slot, start: int, end: int) -> None:
        for i in range(start, end):
            self._put(slot, i, slot.hashes[i])

    def _put(self, slot: Slot, position: int, value: int) -> None:
        draft = int(self.table[slot.pages[position // self.size]])
        if draft:
            self.pool[draft * self.size + position % self.size] = value
