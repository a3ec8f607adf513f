"""Rows that the compiled table may commit, and how their counts reach the request.

A request's tokens live in one place, ``Progress.tokens``, which both paths append to. Its counters
of fast rows gather in the table and are moved here before anyone reads or adds to them.
"""

import numpy as np

from ..cython_ext.request_table import RequestTable
from .commit import Progress
from .controller import NO_PROPOSAL, NO_ROOM, REASONS, TIMED_PLAIN
from .ids import U8
from .request import Request

NO_PAGES = len(REASONS)
OFF_REASONS = (*REASONS, "no KV pages for drafts")

# Nearly every request has such a step: its first, its last one, or one in between.
WEAK_REASONS = (NO_ROOM, NO_PROPOSAL, TIMED_PLAIN)


def attach(table: RequestTable, slot: int, request: Request) -> None:
    """Let the table commit the request's plain rows, if it needs neither text nor logprobs."""
    if request.progress.fast:
        stops = np.array(request.stop_ids, dtype=np.int32)
        table.attach(slot, request.rid, request.progress, stops, request.stream)


def note_reason(progress: Progress, code: int) -> None:
    """Keep the latest reason; one of ``WEAK_REASONS`` only where there is no other."""
    if code and (code not in WEAK_REASONS or progress.spec_off_reason is None):
        progress.spec_off_reason = OFF_REASONS[code]


def has_weak(reasons: U8) -> bool:
    """Whether a row has one of ``WEAK_REASONS``, which the table, as it keeps the latest, skips."""
    codes = reasons.tobytes()
    return any(code in codes for code in WEAK_REASONS)


def move_counts(table: RequestTable, slot: int, request: Request) -> None:
    """Add what the table counted since the last call to the request's progress."""
    progress = request.progress
    if not progress.fast:
        return
    counts = table.take_counts(slot)
    progress.verify_ct += counts.verify_ct
    progress.verify_tokens += counts.verify_tokens
    progress.correct_drafts += counts.correct
    progress.proposed_drafts += counts.proposed
    progress.plain_ct += counts.plain_ct
    if counts.reason:
        progress.spec_off_reason = OFF_REASONS[counts.reason]
    histogram = progress.histogram
    histogram.extend([0] * (len(counts.histogram) - len(histogram)))
    for correct, times in enumerate(counts.histogram):
        histogram[correct] += times
