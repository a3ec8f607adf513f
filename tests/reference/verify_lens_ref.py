"""Verify lengths by the definition: candidates in a list, sorted, the first ones taken."""

import numpy as np


def verify_lens(
    confidence: list[list[float]], caps: list[int], budget: int, limit: int, eps: float
) -> list[int]:
    """float32 products, one after the other; ties go to the shallower draft, then the lower row.

    A negative budget takes what the caps leave."""
    if budget < 0:
        return [1 + min(len(chances), cap) for chances, cap in zip(confidence, caps, strict=True)]
    candidates = []
    for row, chances in enumerate(confidence):
        survival = np.float32(1.0)
        for depth, chance in enumerate(chances):
            survival = survival * np.float32(chance)
            if depth < min(limit, caps[row]) and survival >= np.float32(eps):
                candidates.append((-float(survival), depth, row))
    lens = [1] * len(confidence)
    for _, _, row in sorted(candidates)[:budget]:
        lens[row] += 1
    return lens


def best_budget(
    survivals: list[list[float]], seconds: list[float], limit: int, eps: float
) -> tuple[int, float]:
    """The first budget of the greatest rate, and that rate; seconds[B] of a step with B drafts."""
    left = [s for row in survivals for s in row[:limit] if s >= np.float32(eps)]
    left.sort(reverse=True)
    emitted, best, rate = float(len(survivals)), 0, len(survivals) / seconds[0]
    for drafts, chance in enumerate(left, start=1):
        emitted += chance
        if emitted / seconds[drafts] > rate:
            best, rate = drafts, emitted / seconds[drafts]
    return best, rate
