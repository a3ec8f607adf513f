"""Block verification (Sun et al., arXiv 2403.10444, algorithm 2) of one chain, as plain Python.

``ps`` are the k + 1 laws of the target, ``qs`` the k laws that the drafts were drawn from, all
along the drafted tokens. Numbers may be floats or fractions.
"""

from collections.abc import Sequence
from fractions import Fraction

Number = float | Fraction
Law = Sequence[Number]


def weights(ps: Sequence[Law], qs: Sequence[Law | None], drafts: Sequence[int]) -> list[Number]:
    """The k + 1 shares of the paths with these drafts that go on, of no drafts first."""
    out: list[Number] = [1]
    for p, q, draft in zip(ps, qs, drafts, strict=False):
        known = q is not None and q[draft] > 0
        out.append(min(out[-1] * p[draft] / q[draft], 1) if known and q is not None else 0)
    return out


def residual(weight: Number, p: Law, q: Law | None) -> list[Number]:
    """What ``weight`` times p has beyond q, not normalised."""
    if q is None:
        return [weight * a for a in p]
    return [max(weight * a - b, 0) for a, b in zip(p, q, strict=True)]


def thresholds(ps: Sequence[Law], qs: Sequence[Law | None], drafts: Sequence[int]) -> list[Number]:
    """The k chances that at least so many drafts are kept, where no more are."""
    out: list[Number] = []
    shares = weights(ps, qs, drafts)
    for i in range(1, len(drafts)):
        share: Number = shares[i]
        mass: Number = sum(residual(share, ps[i], qs[i]), start=Fraction(0))
        out.append(share if share in (0, 1) else mass / (mass + 1 - share))
    return [*out, shares[len(drafts)]] if drafts else []


def kept(chances: Sequence[Number], coins: Sequence[float]) -> int:
    """How many drafts are kept."""
    return max((i + 1 for i, h in enumerate(chances) if coins[i] < h), default=0)


def kept_law(chances: Sequence[Number]) -> list[Number]:
    """The k + 1 probabilities of keeping so many."""
    out: list[Number] = []
    rest: Number = 1
    for chance in reversed(chances):
        out.append(rest * chance)
        rest *= 1 - chance
    return [*reversed([*out, rest])]


def next_law(count: int, ps: Sequence[Law], qs: Sequence[Law | None], drafts: Sequence[int]) -> Law:
    """The normalised law of the token behind ``count`` kept drafts."""
    if count == len(drafts):
        return ps[count]
    left = residual(weights(ps, qs, drafts)[count], ps[count], qs[count])
    total = sum(left)
    return [value / total for value in left] if total > 0 else ps[count]
