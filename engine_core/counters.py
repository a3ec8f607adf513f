"""Monotonic counters of the core; the vLLM and SGLang metric names are made from them."""

from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True)
class Counters:
    """Sums since start. Speculation counts only verify rows with at least one proposed draft.

    ``per_pos`` index j: rows whose draft tree reached depth j + 1, or with j + 1 correct drafts.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    preemptions: int = 0
    aborts: int = 0
    finished: int = 0
    chunks: int = 0
    held_rows: int = 0
    shrunk_steps: int = 0
    dropped_rows: int = 0
    row_errors: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_verify_tokens: int = 0
    plain_rows: int = 0
    draft_invalid: int = 0
    worker_busy_ns: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    drafted_per_pos: list[int] = field(default_factory=list)

    def count_verify(self, proposed: int, depth: int, correct: int, kept: int) -> None:
        """Count a verify row that had drafts."""
        self.spec_drafts += 1
        self.spec_draft_tokens += proposed
        self.spec_accepted_tokens += correct
        self.spec_verify_tokens += kept
        lacking = depth - len(self.drafted_per_pos)
        if lacking > 0:
            self.drafted_per_pos.extend([0] * lacking)
            self.accepted_per_pos.extend([0] * lacking)
        for j in range(depth):
            self.drafted_per_pos[j] += 1
        for j in range(correct):
            self.accepted_per_pos[j] += 1
