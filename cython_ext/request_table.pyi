"""Per-slot columns of running requests: lengths, bounds and page-table rows."""

from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from .page_allocator import PageAllocator

_Output = TypeVar("_Output")

class _TokenSink(Protocol):
    """Whose tokens `commit_fast` appends to; the first `sent` of them went out."""

    tokens: array[int]
    sent: int

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
    reach: int

class FastCommit(NamedTuple):
    """What `commit_fast` did: indexes of rows it left, and sums over those it committed."""

    slow_rows: list[int]
    verify_rows: int
    proposed: int
    correct: int
    verify_tokens: int
    plain_rows: int
    tokens: int

class RowCounts(NamedTuple):
    """Counts of one request's fast rows; `reason` of the latest without drafts, 0 if none."""

    verify_ct: int
    verify_tokens: int
    correct: int
    proposed: int
    plain_ct: int
    reason: int
    histogram: list[int]

def check_result(
    kinds: bytes,
    q_caps: bytes,
    accept_lens: bytes,
    tokens: bytes,
    proposed: bytes,
    depths: bytes,
    error_rows: frozenset[int],
    vocab_size: int,
) -> None:
    """Raise ValueError saying what a step's result breaks of its contract (see StepResult)."""

def note_unmatched(proposed: bytes, reasons: NDArray[np.uint8], rows: int, code: int) -> None:
    """Give those of the first ``rows`` rows that have no reason yet and no drafts (``proposed``
    int32[R]) the reason ``code``; ``reasons`` uint8[R]."""

@final
class RequestTable:
    """What planning and commit touch for every row of every step."""

    def __new__(cls, max_slots: int, page_size: int, draft_reach: int = 0) -> Self: ...
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

    def decodable(
        self, slots: NDArray[np.int32], limit: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Slots whose row in flight, if any, need not end the request, and their draft room."""

    def bind_room(self, slots: NDArray[np.int32], q_caps: NDArray[np.int32]) -> NDArray[np.int32]:
        """Drafts that each slot's newest row of `q_caps` (int32 [n]) tokens may hold, int32 [n]."""

    def attach(
        self,
        slot: int,
        rid: str,
        sink: _TokenSink,
        stop_ids: NDArray[np.int32],
        stream: bool,
    ) -> None:
        """Let `commit_fast` commit this slot's plain rows into `sink.tokens`, an array('i')."""

    def detach(self, slot: int) -> None:
        """The request ends or leaves: no fast commits and no drafts for its rows in flight."""

    def take_counts(self, slot: int) -> RowCounts:
        """Counts of the rows that `commit_fast` committed since the last call."""

    def commit_fast(
        self,
        step: int,
        slots: bytes,
        kinds: bytes,
        accept_lens: bytes,
        tokens: bytes,
        proposed: bytes,
        depths: bytes,
        reasons: NDArray[np.uint8],
        accepted_per_pos: NDArray[np.int64],
        drafted_per_pos: NDArray[np.int64],
    ) -> FastCommit:
        """Commit all verify rows that cannot end their request; list the others' indexes."""

    def stream_outputs(
        self,
        slots: bytes,
        skip: list[int],
        interval: int,
        make: Callable[[str, bytes, tuple[()]], _Output],
    ) -> list[_Output]:
        """make(rid, new tokens as bytes, ()) for each slot (int32 buffer) whose stream is due."""

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
