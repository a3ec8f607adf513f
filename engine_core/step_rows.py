"""A step's result as arrays, checked against the plan it answers."""

from typing import NamedTuple

from ..cython_ext.request_table import check_result
from .ids import I32, U8, i32, u8
from .plan import StepResult, TokenLogprobs
from .step_builder import Flight
from .worker import WorkerFailed


class StepRows(NamedTuple):
    """Arrays [R] of a result that keeps its contract; ``tokens`` are joined."""

    kinds: U8
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
        u8(plan.kinds),
        i32(result.accept_lens),
        i32(result.tokens),
        i32(result.proposed),
        i32(result.depths),
        {entry.row: entry.tokens for entry in result.logprobs},
        {entry.row: entry.message for entry in result.errors},
    )
    try:
        check_result(
            rows.kinds,
            flight.q_caps,
            rows.accept_lens,
            rows.tokens,
            rows.proposed,
            rows.depths,
            frozenset(rows.errors),
            vocab_size,
        )
    except ValueError as error:
        raise WorkerFailed(f"step {plan.step}: {error}") from error
    return rows
