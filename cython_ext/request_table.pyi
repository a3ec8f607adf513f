"""Per-slot columns of running requests: lengths, bounds and page-table rows."""

from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from .page_allocator import PageAllocator

class DecodeRows(NamedTuple):
    """Verify rows of a step as int32 buffers, and how many rows found no pages."""

    slots: bytes
    q_caps: bytes
    page_slots: bytes
    page_indexes: bytes
    page_ids: bytes
    held_back: int

class SlotState(NamedTuple):
    """One slot's columns, for checks and traces."""

    length: int
    max_total: int
    target: int
    filled: int
    emits: int
    held: int
    last_step: int

@final
class RequestTable:
    """What planning and commit touch for every row of every step."""

    def __init__(self, max_slots: int, page_size: int) -> None: ...
    @property
    def max_slots(self) -> int:
        """Slots, open or not."""

    def open(
        self,
        slot: int,
        length: int,
        max_total: int,
        pages: NDArray[np.int32],
        filled: int,
        sure_length: bool,
        drafts: bool,
    ) -> None:
        """Put a request of `length` known tokens with its pages (int32 [n]) into a slot."""

    def close(self, slot: int) -> None:
        """Forget the request; its pages are the caller's to free."""

    def is_open(self, slot: int) -> bool:
        """Whether the slot holds a request."""

    def state(self, slot: int) -> SlotState:
        """Columns of an open slot."""

    def last_step(self, slot: int) -> int:
        """Newest step that has a row of this slot; 0 when none had."""

    def length(self, slot: int) -> int:
        """Committed tokens, the prompt included."""

    def held(self, slot: int) -> int:
        """Pages in the slot's page-table row."""

    def pages(self, slot: int) -> NDArray[np.int32]:
        """The slot's page-table row, int32 [held], a copy."""

    def unfilled(self, slot: int) -> int:
        """Tokens that prefill has yet to plan."""

    def valid_kv(self, slot: int) -> int:
        """Leading tokens whose KV is right once no row is in flight."""

    def decodable(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of the slots (int32 [n]) whose row in flight, if any, need not end the request."""

    def draft_room(self, slots: NDArray[np.int32], limit: int) -> NDArray[np.int32]:
        """Most drafts, up to `limit`, of each slot's next row, int32 [n]; -1 if it wants none."""

    def bind_room(
        self, slots: NDArray[np.int32], q_caps: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Drafts that each slot's newest row of `q_caps` (int32 [n]) tokens may hold, int32 [n]."""

    def stop_drafts(self, slot: int) -> None:
        """The request ends or leaves: its rows in flight get no drafts any more."""

    def plan_chunk(self, slot: int, count: int, step: int, emits: int) -> int:
        """Plan `count` more prefill tokens; return the first one's position."""

    def settle(self, slot: int, kept: int, step: int) -> None:
        """Account for the result of this slot's row of `step`, which kept `kept` tokens."""

    def expected_pages(self, slots: NDArray[np.int32], ratio: float, clip: int) -> int:
        """Pages that the requests may still ask for, `ratio` of what they could at most."""

    def lacking_pages(self, slots: NDArray[np.int32], caps: NDArray[np.int32]) -> int:
        """Pages that `plan_decode` would take for these rows."""

    def plan_decode(
        self,
        step: int,
        slots: NDArray[np.int32],
        caps: NDArray[np.int32],
        allocator: PageAllocator,
    ) -> DecodeRows:
        """Plan a verify row for each slot (int32 [n]) of at most `caps` (int32 [n]) tokens."""

    def corrupt_for_test(self, slot: int, kind: str) -> None:
        """Damage the state so that a test can see a checker notice."""
