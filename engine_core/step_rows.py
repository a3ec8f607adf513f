"""A step's result: checked against the plan it answers, and read row by row."""

from typing import NamedTuple

import numpy as np

from ..cython_ext import request_table as table
from .controller import NO_MATCH, OVER_BUDGET
from .ids import I32, i32
from .plan import RowError, StepResult, TokenLogprobs
from .step_builder import Flight
from .worker import WorkerFailed

_NO_ROWS: frozenset[int] = frozenset()


def read_result(flight: Flight, result: StepResult, vocab_size: int) -> None:
    """Check a result. Raises WorkerFailed naming what it breaks."""
    plan = flight.plan
    if result.step != plan.step:
        raise WorkerFailed(f"result of step {result.step} where step {plan.step} was due")
    try:
        table.check_result(
            plan.kinds,
            plan.q_caps,
            result.accept_lens,
            result.tokens,
            result.proposed,
            result.depths,
            frozenset([error.row for error in result.errors]) if result.errors else _NO_ROWS,
            vocab_size,
        )
    except ValueError as error:
        raise WorkerFailed(f"step {plan.step}: {error}") from error


def note_unmatched(flight: Flight, result: StepResult) -> None:
    """Say of verify rows that could have had drafts and got none that nothing matched, or that the
    step's budget left nothing."""
    code = NO_MATCH if flight.plan.budget < 0 else OVER_BUDGET
    table.note_unmatched(result.proposed, flight.reasons, flight.verify_rows, code)


class SlowRows(NamedTuple):
    """What rows need that are committed one by one: arrays [R], ``tokens`` joined."""

    accept_lens: I32
    tokens: I32
    starts: I32
    proposed: I32
    depths: I32
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    errors: dict[int, RowError]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]


def slow_rows(result: StepResult) -> SlowRows:
    """View a checked result by rows."""
    lens = i32(result.accept_lens)
    return SlowRows(
        lens,
        i32(result.tokens),
        np.cumsum(lens, dtype=np.int32) - lens,
        i32(result.proposed),
        i32(result.depths),
        {entry.row: entry.tokens for entry in result.logprobs},
        {entry.row: entry for entry in result.errors},
        {entry.row: entry.tokens for entry in result.prompt_logprobs},
    )


def kept_tokens(rows: SlowRows, counts: I32) -> I32:
    """The first ``counts`` (int32[R]) tokens of every row, joined."""
    row_of_token = np.repeat(np.arange(len(counts)), rows.accept_lens)
    within = np.arange(len(rows.tokens)) - rows.starts[row_of_token]
    return rows.tokens[within < counts[row_of_token]]
