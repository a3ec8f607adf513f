"""What is said of a cell of the matrix: a feature at a batch size."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from ...engine_core.divergence import ENDED, TIE_GAP
from ...engine_core.refusal import RefusedError
from ..errors import RequestFailed
from .draws import LEAST_P, Shift
from .outputs import Deviation, Parting

Status = Literal["exact", "rounding", "lossy", "refused", "failed"]
NOT_SUPPORTED = 501  # a refusal, unlike other statuses from 500 on
VALUE_GAP = 1e-4  # of two log-probabilities that are equal up to rounding, in float32
GapOf = Callable[[Parting], float]
TokenText = Callable[[int], str]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cell failed. ``prompt``: its number from 0, ``position``: in the output, from 0.

    ``expected`` and ``got``: tokens, -1 where an output had ended or tokens are not what differs.
    ``output``: what the request gave so far, empty if it is none in particular; ``step``: of the
    trace, in which it gave the last of that. ``found``: a sentence.
    """

    prompt: int
    sample: int
    position: int
    expected: int
    got: int
    found: str
    output: tuple[int, ...] = ()
    step: int | None = None


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """``gap``: the largest one between outputs that part, of logits or log-probabilities.

    ``p``: of the least likely test, times their number, where distributions were compared.
    ``reason``: why it was refused. ``differences``: outputs that differ, rounding included.
    """

    batch: int
    status: Status
    gap: float | None = None
    p: float | None = None
    reason: str = ""
    differences: int = 0
    failure: Failure | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A feature at every batch size, and its drafts."""

    feature: str
    cells: list[Cell]
    accepted_drafts: int
    proposed_drafts: int


class Limits(msgspec.Struct, frozen=True):
    """How far rounding goes: of logits at a parting, and of log-probabilities.

    In half precision what plain decoding differs by from itself, by the batch.
    """

    gap: float = TIE_GAP
    value: float = VALUE_GAP


def judge_lossy(batch: int, found: Sequence[Parting]) -> Cell:
    """A cell whose outputs may differ, for the user gave up the promise."""
    if not found:
        return Cell(batch=batch, status="exact")
    return Cell(batch=batch, status="lossy", differences=len(found))


def judge_outputs(
    batch: int,
    found: Sequence[Parting],
    values: Deviation | None,
    limits: Limits,
    gap_of: GapOf,
    token_text: TokenText,
) -> Cell:
    """A cell whose tokens and log-probabilities were compared; gaps are asked up to a failure."""
    worst = 0.0
    for parting in found:
        gap = gap_of(parting)
        worst = max(worst, gap)
        if gap >= limits.gap:
            failure = _parted(parting, gap, token_text)
            return Cell(
                batch=batch, status="failed", gap=gap, differences=len(found), failure=failure
            )
    if values is not None and values.size > limits.value:
        return Cell(
            batch=batch,
            status="failed",
            gap=values.size,
            differences=len(found),
            failure=_misvalued(values),
        )
    if found:
        return Cell(batch=batch, status="rounding", gap=worst, differences=len(found))
    if values is not None and values.size > VALUE_GAP:
        return Cell(batch=batch, status="rounding", gap=values.size)
    return Cell(batch=batch, status="exact")


def _parted(parting: Parting, gap: float, token_text: TokenText) -> Failure:
    def shown(token: int) -> str:
        return "the end" if token == ENDED else f"{token} {token_text(token)!r}"

    apart = f", logits {gap:.3g} apart" if gap < float("inf") else ""
    words = f"expected {shown(parting.expected)}, got {shown(parting.got)}{apart}"
    return Failure(
        prompt=parting.request.number,
        sample=parting.sample,
        position=parting.position,
        expected=parting.expected,
        got=parting.got,
        found=parting.words or words,
        output=parting.before if parting.got == ENDED else (*parting.before, parting.got),
    )


def _misvalued(values: Deviation) -> Failure:
    of = "" if values.prompt_token is None else f" of the prompt's token {values.prompt_token}"
    return Failure(
        prompt=values.request.number,
        sample=values.sample,
        position=values.position,
        expected=ENDED,
        got=ENDED,
        output=values.output,
        found=f"log-probabilities{of} {values.size:.3g} apart from those of plain decoding",
    )


def judge_draws(batch: int, shifts: Sequence[Shift], tests: int, token_text: TokenText) -> Cell:
    """A cell whose draws were compared, as one of ``tests`` tests of the whole check."""
    worst = min(shifts, key=lambda shift: shift.p)
    p = min(1.0, worst.p * tests)
    if p >= LEAST_P:
        return Cell(batch=batch, status="exact", p=p)
    texts = " ".join(f"{token} {token_text(token)!r}" for token in worst.pair)
    token = worst.pair[-1] if worst.pair else ENDED
    failure = Failure(
        prompt=worst.request.number,
        sample=0,
        position=worst.position,
        expected=token if worst.plain > worst.drafted else ENDED,
        got=token if worst.drafted > worst.plain else ENDED,
        found=f"another distribution, p = {p:.2g}: {texts} drawn {worst.plain} times by plain "
        f"decoding and {worst.drafted} times with drafts",
    )
    return Cell(batch=batch, status="failed", p=p, failure=failure)


def unserved(batch: int, error: RefusedError | RequestFailed) -> Cell:
    """A cell whose requests plain decoding refused, or ended with an error."""
    refusal = error.refused.status if isinstance(error, RefusedError) else error.status
    if 400 <= refusal < 500 or refusal == NOT_SUPPORTED:
        return Cell(batch=batch, status="refused", reason=str(error))
    return _unfinished(batch, f"without drafts: {error}")


def lost(batch: int, error: RefusedError | RequestFailed) -> Cell:
    """A cell whose requests plain decoding served, and not with drafts.

    Only what this engine says that it does not support with its drafter, before a request runs, is
    no failure of drafts.
    """
    if isinstance(error, RefusedError) and error.refused.status == NOT_SUPPORTED:
        return Cell(batch=batch, status="refused", reason=str(error))
    return _unfinished(batch, f"served without drafts, but with them: {error}")


def _unfinished(batch: int, found: str) -> Cell:
    failure = Failure(prompt=ENDED, sample=0, position=0, expected=ENDED, got=ENDED, found=found)
    return Cell(batch=batch, status="failed", failure=failure)
