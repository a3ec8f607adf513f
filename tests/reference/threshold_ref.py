"""Target-only acceptance with thresholds at one node of a tree, as plain Python."""

from collections.abc import Sequence

from .rejection_ref import draw, uniform


def accepted(
    p: Sequence[float], drafts: Sequence[int], coin: float, single: float, acc: float
) -> int | None:
    """The draft of ``drafts``, in their order, that is accepted."""
    tried = 0.0
    for draft in dict.fromkeys(drafts):
        tried += p[draft]
        if p[draft] > 0 and (coin < tried / max(acc, 1e-9) or p[draft] >= single):
            return draft
    return None


def remaining(p: Sequence[float], drafts: Sequence[int]) -> list[float]:
    """What is left of p without drafts, not normalised; p where that is nothing."""
    left = [0.0 if token in drafts else chance for token, chance in enumerate(p)]
    return left if any(left) else list(p)


def decide(
    p: Sequence[float],
    drafts: Sequence[int],
    thresholds: tuple[float, float],
    seeds: tuple[int, int, int],
    position: int,
) -> int:
    """The node's token; ``seeds`` of the target's own noise, of the coin and of what remains."""
    if not drafts:
        return draw(p, seeds[0], position)
    found = accepted(p, drafts, uniform(seeds[1], position), *thresholds)
    return draw(remaining(p, drafts), seeds[2], position) if found is None else found


def law(p: Sequence[float], drafts: Sequence[int], single: float, acc: float) -> list[float]:
    """The law of a node's token, by the coin's interval of each draft."""
    out, tried, spent = [0.0] * len(p), 0.0, 0.0
    for draft in dict.fromkeys(drafts):
        tried += p[draft]
        reach = 1.0 if p[draft] >= single else min(1.0, tried / max(acc, 1e-9))
        if p[draft] > 0:
            out[draft] = max(0.0, reach - spent)
            spent = max(spent, reach)
    left = remaining(p, drafts)
    return [have + (1 - spent) * rest / sum(left) for have, rest in zip(out, left, strict=True)]
