"""A step's result against the plan it answers: checked once, then read row by row."""

from dataclasses import dataclass
from typing import final

import numpy as np

from .ids import I32, RowKind, i32, u8
from .plan import StepResult, TokenLogprobs
from .step_builder import Flight
from .worker import WorkerFailed


@final
@dataclass(frozen=True, slots=True)
class StepRows:
    """Arrays int32[R] of a result that keeps its contract; ``tokens`` are joined."""

    accept_lens: I32
    tokens: I32
    proposed: I32
    depths: I32
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    errors: dict[int, str]


def read_result(flight: Flight, result: StepResult, vocab_size: int) -> StepRows:
    """Check a result. Raises WorkerFailed naming what it breaks."""
    plan = flight.plan
    if result.step != plan.step:
        raise WorkerFailed(f"result of step {result.step} where step {plan.step} was due")
    rows = StepRows(
        i32(result.accept_lens),
        i32(result.tokens),
        i32(result.proposed),
        i32(result.depths),
        {entry.row: entry.tokens for entry in result.logprobs},
        {entry.row: entry.message for entry in result.errors},
    )
    count = plan.num_rows
    if not len(rows.accept_lens) == len(rows.proposed) == len(rows.depths) == count:
        raise WorkerFailed(f"step {plan.step}: the result does not have the plan's {count} rows")
    if int(rows.accept_lens.sum()) != len(rows.tokens):
        raise WorkerFailed(f"step {plan.step}: accept_lens do not sum to the number of tokens")
    low, high = _emission_bounds(flight, rows.proposed)
    for row in rows.errors:
        low[row] = high[row] = 0
    if bool(((rows.accept_lens < low) | (rows.accept_lens > high)).any()):
        row = int(np.flatnonzero((rows.accept_lens < low) | (rows.accept_lens > high))[0])
        raise WorkerFailed(f"step {plan.step}: row {row} emits {rows.accept_lens[row]} tokens")
    if bool((rows.proposed > np.maximum(flight.q_caps - 1, 0)).any()):
        raise WorkerFailed(f"step {plan.step}: a row verified more drafts than it was given")
    if len(rows.tokens) and not 0 <= int(rows.tokens.min()) <= int(rows.tokens.max()) < vocab_size:
        raise WorkerFailed(f"step {plan.step}: a token is outside the vocabulary")
    return rows


def _emission_bounds(flight: Flight, proposed: I32) -> tuple[I32, I32]:
    kinds = u8(flight.plan.kinds)
    low = (kinds != RowKind.PREFILL).astype(np.int32)
    high = np.where(kinds == RowKind.VERIFY, proposed + 1, low).astype(np.int32)
    return low, high
