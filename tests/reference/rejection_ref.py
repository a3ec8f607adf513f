"""Rejection sampling of one drafted token, as plain Python."""

import math
from collections.abc import Sequence

from .sampling_ref import MASK32, gumbel, philox4x32_10


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    return [weight / math.fsum(weights) for weight in weights]


def accept_probability(p: Sequence[float], q: Sequence[float], draft: int) -> float:
    return min(1.0, p[draft] / q[draft]) if q[draft] > 0 else 0.0


def residual(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """Normalised; p where nothing is left."""
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    total = math.fsum(left)
    return [value / total for value in left] if total > 0 else list(p)


def uniform(seed: int, position: int) -> float:
    words = philox4x32_10(
        [0, 0, position & MASK32, position >> 32 & MASK32], [seed & MASK32, seed >> 32 & MASK32]
    )
    return (words[0] + 0.5) / 2**32


def draw(law: Sequence[float], seed: int, position: int) -> int:
    scores = {
        token: math.log(chance) + gumbel(seed, position, token)
        for token, chance in enumerate(law)
        if chance > 0
    }
    return max(scores, key=lambda t: (scores[t], -t))


def decide(
    p: Sequence[float],
    q: Sequence[float] | None,
    draft: int,
    seeds: tuple[int, int, int],
    position: int,
) -> int:
    """The node's token; ``seeds`` of the target's own noise, of u and of the residual's."""
    if draft < 0:
        return draw(p, seeds[0], position)
    if q is None:
        return draw(p, seeds[2], position)
    if uniform(seeds[1], position) < accept_probability(p, q, draft):
        return draft
    return draw(residual(p, q), seeds[2], position)
