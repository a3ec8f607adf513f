"""Do drafts change what is drawn? Chi-square tests of two samples, at an output's first places.

Rejection sampling keeps the target's distribution and not its tokens, so tokens of equal seeds
cannot be compared. Plain decoding draws from that distribution: what it draws many times is
compared with what is drawn with drafts, at every place of a whole round: the token that comes
before any draft, the longest chain of drafts, and the token behind it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..llm import LLM
from .outputs import Answers, Request, answers

PROMPTS = 2
DRAWS = 256  # of each prompt, without and with drafts
LEAST_P = 1e-4  # of a whole check
_LEAST = 20  # draws that a cell of the table has on each side, on average
_SEEDS = 1 << 20  # between those of plain decoding and of each batch size

Pair = tuple[int, ...]


class Shift(NamedTuple):
    """The least likely of some tests: p, and the tokens at two places that it shows most in.

    ``plain`` and ``drafted``: how often each of both drew ``pair``, at ``position`` and the next.
    """

    p: float
    request: Request
    position: int
    pair: Pair
    plain: int
    drafted: int


def places(llm: LLM) -> int:
    """Tokens of a draw."""
    info = llm.info
    longest = info.num_draft_tokens - 1 if info.draft_shape is None else info.draft_shape.steps
    return longest + 2


def draws(llm: LLM, requests: Sequence[Request], batch: int, speculative: bool) -> Answers:
    """Many short outputs of the first prompts, those of a prompt one after the other.

    Seeds are others with drafts, and at every batch size: these are samples of their own.
    """
    first = _SEEDS * batch if speculative else 0
    return answers(
        llm,
        [
            request._replace(
                params=replace(
                    request.params,
                    seed=first + draw,
                    max_new_tokens=min(places(llm), request.params.max_new_tokens),
                )
            )
            for request in requests[:PROMPTS]
            for draw in range(DRAWS // request.params.n)
        ],
        batch,
        speculative,
    )


def shifts(requests: Sequence[Request], plain: Answers, drafted: Answers) -> Iterator[Shift]:
    """A test for each prompt and each two places in a row that plain decoding gives."""
    each = len(plain) // len(requests[:PROMPTS])
    for number, request in enumerate(requests[:PROMPTS]):
        mine = slice(number * each, (number + 1) * each)
        longest = max(len(one.token_ids) for some in plain[mine] for one in some)
        for position in range(max(1, longest - 1)):
            ours, theirs = (_pairs(some[mine], position) for some in (plain, drafted))
            yield _shift(request, position, ours, theirs)


def _pairs(some: Answers, position: int) -> Counter[Pair]:
    return Counter(one.token_ids[position : position + 2] for each in some for one in each)


def _shift(request: Request, position: int, ours: Counter[Pair], theirs: Counter[Pair]) -> Shift:
    pair = max(ours | theirs, key=lambda each: abs(ours[each] - theirs[each]))
    p = same_law(_cells(ours, theirs))
    return Shift(p, request, position, pair, ours[pair], theirs[pair])


def _cells(ours: Counter[Pair], theirs: Counter[Pair]) -> list[tuple[int, int]]:
    """Counts on each side, of pairs that are frequent enough by themselves, and of rarer ones
    together: those that are about as frequent share a cell. Which do depends on both sides alike.
    """
    both = ours + theirs
    cells: list[tuple[int, int]] = []
    left = right = 0
    for pair in sorted(both, key=lambda each: (-both[each], each)):
        left, right = left + ours[pair], right + theirs[pair]
        if left + right >= 2 * _LEAST:
            cells.append((left, right))
            left = right = 0
    if left + right:
        last = cells.pop() if cells else (0, 0)
        cells.append((last[0] + left, last[1] + right))
    return cells


def same_law(cells: Sequence[tuple[int, int]]) -> float:
    """p of two columns of counts, by cells, if both were drawn from one distribution."""
    totals = [sum(column) for column in zip(*cells, strict=True)]
    whole = sum(totals)
    if len(cells) < 2 or not all(totals):
        return 1.0
    square = 0.0
    for cell in cells:
        for count, total in zip(cell, totals, strict=True):
            expected = sum(cell) * total / whole
            square += (count - expected) ** 2 / expected
    return chi_square_tail(square, len(cells) - 1)


def chi_square_tail(square: float, freedom: int) -> float:
    """Probability of at least ``square`` under chi-square of ``freedom`` degrees (closed form)."""
    half = square / 2
    if half <= 0:
        return 1.0
    odd = freedom % 2
    powers = [i + odd / 2 for i in range(freedom // 2)]
    tail = sum(math.exp(a * math.log(half) - half - math.lgamma(a + 1)) for a in powers)
    return min(1.0, tail + (math.erfc(math.sqrt(half)) if odd else 0.0))
