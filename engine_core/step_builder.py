"""Collects the rows of one step and makes its plan."""

from dataclasses import dataclass
from typing import final

import numpy as np

from ..cython_ext.request_table import DecodeRows
from .ids import I32, U8, RowKind
from .plan import SlotInit, StepPlan

_KIND_VERIFY = bytes([RowKind.VERIFY])


@final
@dataclass(frozen=True, slots=True)
class Flight:
    """A planned step until its result is in. ``reasons`` uint8[R]: why a row has no drafts.

    ``slots`` and ``q_caps`` are the plan's, int32[R]. ``base_tokens``: query tokens without any
    draft. ``verify_rows`` of the rows verify; they come first.
    """

    plan: StepPlan
    slots: I32
    q_caps: I32
    reasons: U8
    verify_rows: int
    base_tokens: int


@final
class StepBuilder:
    """Verify rows first, then prefill chunks, in the order they are added."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._decode: DecodeRows | None = None
        self._reasons: U8 = np.empty(0, dtype=np.uint8)
        self._late_bound = False
        self._slots: list[int] = []
        self._kinds = bytearray()
        self._lengths: list[int] = []
        self._starts: list[int] = []
        self._tokens: list[bytes] = []
        self._inits: list[SlotInit] = []
        self._page_slots: list[int] = []
        self._page_indexes: list[int] = []
        self._page_ids: list[bytes] = []

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the chunks so far."""
        return sum(self._lengths)

    def decode(self, rows: DecodeRows, reasons: U8, late_bound: bool) -> None:
        """Set the verify rows, ``reasons`` uint8[their number]."""
        self._decode = rows
        self._reasons = reasons
        self._late_bound = late_bound and bool(rows.slots)

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
        self._starts.append(start)
        self._tokens.append(tokens.tobytes())

    def build(self) -> Flight | None:
        """The step, or None when it has no rows."""
        decode = self._decode
        slots, q_caps = (b"", b"") if decode is None else (decode.slots, decode.q_caps)
        verify_rows = len(slots) // 4
        if not verify_rows and not self._slots:
            return None
        deltas = (b"", b"", b"") if decode is None else decode[2:5]
        plan = StepPlan(
            step=self.step,
            late_bound=self._late_bound,
            slots=slots + _int32(self._slots),
            kinds=_KIND_VERIFY * verify_rows + bytes(self._kinds),
            q_caps=q_caps + _int32(self._lengths),
            starts=b"\xff" * (4 * verify_rows) + _int32(self._starts),
            tokens=b"".join(self._tokens),
            inits=tuple(self._inits),
            page_slots=deltas[0] + _int32(self._page_slots),
            page_indexes=deltas[1] + _int32(self._page_indexes),
            page_ids=deltas[2] + b"".join(self._page_ids),
        )
        rows = plan.num_rows
        reasons = np.zeros(rows, dtype=np.uint8)
        reasons[:verify_rows] = self._reasons[:verify_rows]
        return Flight(
            plan=plan,
            slots=np.frombuffer(plan.slots, dtype=np.int32),
            q_caps=np.frombuffer(plan.q_caps, dtype=np.int32),
            reasons=reasons,
            verify_rows=verify_rows,
            base_tokens=verify_rows + self.prefill_tokens,
        )


def _int32(values: list[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes() if values else b""
