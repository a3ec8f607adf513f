"""Collects the rows of one step and makes its plan."""

from typing import final

import msgspec
import numpy as np

from ..cython_ext.request_table import DecodeRows
from .ids import I32, U8, RowKind, i32
from .plan import SlotInit, StepPlan
from .window_steps import WindowChanges

_KIND_VERIFY = bytes([RowKind.VERIFY])
_RESOLVED_LATER = b"\xff\xff\xff\xff"  # int32 -1
_NO_WINDOW = WindowChanges(b"", b"", b"")
_NO_DECODE = DecodeRows(b"", b"", b"", b"", b"", 0)


@final
class Flight(msgspec.Struct, frozen=True):
    """A planned step until its result is in. ``reasons`` uint8[R]: why a row has no drafts.

    ``base_tokens``: query tokens without any draft. ``verify_rows`` of the rows verify; they come
    first.
    """

    plan: StepPlan
    reasons: U8
    verify_rows: int
    base_tokens: int

    @property
    def slots(self) -> I32:
        """The rows' slots, int32[R]."""
        return i32(self.plan.slots)

    @property
    def q_caps(self) -> I32:
        """The rows' query tokens at most, int32[R]."""
        return i32(self.plan.q_caps)


@final
class StepBuilder:
    """Verify rows first, then prefill chunks, in the order they are added."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._decode = _NO_DECODE
        self._reasons: U8 = np.empty(0, dtype=np.uint8)
        self._late_bound = False
        self._accept_caps = b""
        self._device_caps = b""
        self.budget = -1
        self.window = _NO_WINDOW
        self.prefill_tokens = 0
        self._slots: list[int] = []
        self._kinds = bytearray()
        self._lengths: list[int] = []
        self._starts: list[int] = []
        self._tokens: list[bytes] = []
        self._inits: list[SlotInit] = []
        self._page_slots: list[int] = []
        self._page_indexes: list[int] = []
        self._page_ids: list[bytes] = []

    def decode(
        self,
        rows: DecodeRows,
        reasons: U8,
        late_bound: bool,
        accept_caps: I32 | None,
        device_caps: I32 | None = None,
    ) -> None:
        """Set the verify rows, ``reasons`` uint8[their number]; for the caps see StepPlan."""
        self._decode = rows
        self._reasons = reasons
        self._accept_caps = b"" if accept_caps is None else accept_caps.tobytes()
        self._device_caps = b"" if device_caps is None else device_caps.tobytes()
        self._late_bound = late_bound and bool(rows.slots)

    @property
    def inits(self) -> list[SlotInit]:
        """The requests that enter slots so far."""
        return self._inits

    @property
    def late_bound(self) -> bool:
        """Whether the step waits for drafts."""
        return self._late_bound

    @property
    def verify_rows(self) -> DecodeRows:
        """The verify rows."""
        return self._decode

    @property
    def slots(self) -> I32:
        """Slots of all rows so far, int32[R]."""
        return i32(self._decode.slots + _int32(self._slots))

    def init(self, init: SlotInit, pages: I32) -> None:
        """A request enters a slot with these pages, int32[n]."""
        self._inits.append(init)
        self._page_slots.extend([init.slot] * len(pages))
        self._page_indexes.extend(range(len(pages)))
        self._page_ids.append(pages.tobytes())

    def chunk(self, slot: int, kind: RowKind, start: int, tokens: I32) -> None:
        """Add a prefill row over ``tokens``, int32[n], at positions from ``start``."""
        self._slots.append(slot)
        self._kinds.append(kind)
        self._lengths.append(len(tokens))
        self.prefill_tokens += len(tokens)
        self._starts.append(start)
        self._tokens.append(tokens.tobytes())

    def build(self) -> Flight | None:
        """The step, or None when it has no rows."""
        decode = self._decode
        verify_rows = len(decode.slots) // 4
        if not verify_rows and not self._slots:
            return None
        plan = StepPlan(
            self.step,
            self._late_bound,
            decode.slots + _int32(self._slots),
            _KIND_VERIFY * verify_rows + bytes(self._kinds),
            decode.q_caps + _int32(self._lengths),
            _RESOLVED_LATER * verify_rows + _int32(self._starts),
            b"".join(self._tokens),
            tuple(self._inits),
            decode.page_slots + _int32(self._page_slots),
            decode.page_indexes + _int32(self._page_indexes),
            decode.page_ids + b"".join(self._page_ids),
            self.budget,
            self._accept_caps,
            *self.window,
            device_caps=self._device_caps,
        )
        reasons = self._reasons
        if self._slots:
            reasons = np.concatenate((reasons, np.zeros(len(self._slots), dtype=np.uint8)))
        return Flight(plan, reasons, verify_rows, verify_rows + self.prefill_tokens)


def _int32(values: list[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes() if values else b""
