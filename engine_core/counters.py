"""Monotonic counters of the core; the vLLM and SGLang metric names are made from them."""

from dataclasses import dataclass, field
from typing import final

import numpy as np
import numpy.typing as npt

from ..cython_ext.request_table import FastCommit
from .ids import i32
from .plan import StepPlan, StepResult

MAX_DEPTH = 64
I64 = npt.NDArray[np.int64]


def _per_pos() -> I64:
    return np.zeros(MAX_DEPTH, dtype=np.int64)


@final
@dataclass(slots=True)
class Counters:
    """Sums since start. Speculation counts only verify rows with at least one proposed draft.

    ``*_per_pos`` int64[64], index j: rows whose draft tree reached depth j + 1, or with at least
    j + 1 correct drafts. ``held_rows`` waited a step for pages, ``shrunk_steps`` lost their drafts
    to the lack of pages, ``dropped_rows`` were in flight when their request ended.
    ``budget_steps`` had a budget of verified drafts, ``budget_drafts`` together; ``trimmed_drafts``
    held but lay beyond a cap (mode cap-accept). ``illegal_drafts`` of the host were left out
    because a grammar forbids them, ``forced_drafts`` made because it allows nothing else.
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
    mask_wait_ns: int = 0
    budget_steps: int = 0
    budget_drafts: int = 0
    trimmed_drafts: int = 0
    illegal_drafts: int = 0
    forced_drafts: int = 0
    accepted_per_pos: I64 = field(default_factory=_per_pos)
    drafted_per_pos: I64 = field(default_factory=_per_pos)

    def count_fast(self, fast: FastCommit) -> None:
        """Add what the compiled commit did; the ``*_per_pos`` have it already."""
        self.spec_drafts += fast.verify_rows
        self.spec_draft_tokens += fast.proposed
        self.spec_accepted_tokens += fast.correct
        self.spec_verify_tokens += fast.verify_tokens
        self.plain_rows += fast.plain_rows
        self.generated_tokens += fast.tokens

    def count_drafts(self, plan: StepPlan, result: StepResult) -> None:
        """Count what a step's verify lengths were planned as, what caps took and grammars did."""
        if plan.budget >= 0:
            self.budget_steps += 1
            self.budget_drafts += plan.budget
        if result.trimmed:
            self.trimmed_drafts += int(i32(result.trimmed).sum())
        self.illegal_drafts += result.illegal
        self.forced_drafts += result.forced

    def count_verify(self, proposed: int, depth: int, correct: int, kept: int) -> None:
        """Count a verify row that had drafts."""
        self.spec_drafts += 1
        self.spec_draft_tokens += proposed
        self.spec_accepted_tokens += correct
        self.spec_verify_tokens += kept
        self.drafted_per_pos[:depth] += 1
        self.accepted_per_pos[:correct] += 1


def used(per_pos: I64) -> tuple[int, ...]:
    """The counts up to the last one that is not zero."""
    counts: list[int] = per_pos.tolist()
    while counts and counts[-1] == 0:
        counts.pop()
    return tuple(counts)
