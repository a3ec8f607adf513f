"""Draft trees from their definition: a candidate at a time, in plain Python.

A path is a tuple of draft tokens. ``best(path)`` gives the K likeliest tokens behind it with their
probabilities, the likeliest first, the lower id among equals.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Best = Callable[[tuple[int, ...]], list[tuple[int, float]]]


@dataclass(frozen=True)
class Candidate:
    """A node that may be proposed. ``flat``: its place among all; ``parent``: its parent's."""

    flat: int
    token: int
    score: float
    parent: int | None
    path: tuple[int, ...]


def grow(best: Best, steps: int, width: int) -> list[Candidate]:
    """All candidates of ``steps`` levels, of which ``width`` a level are grown further."""
    found: list[Candidate] = []
    beam: list[Candidate | None] = [None]
    for level in range(steps):
        new: list[Candidate] = []
        for above in beam:
            path = () if above is None else above.path
            score = np.float32(1.0 if above is None else above.score)
            for token, chance in best(path)[:width]:
                product = float(score * np.float32(chance))
                flat = len(found) + len(new)
                parent = None if above is None else above.flat
                new.append(Candidate(flat, token, product, parent, (*path, token)))
        found += new
        beam = list(sorted(new, key=lambda c: (-c.score, c.flat))[:width])
        assert len(new) == (width if level == 0 else width * width)
    return found


def choose(candidates: list[Candidate], count: int) -> tuple[list[int], list[int], int]:
    """Tokens and parents (0: the bonus token) of the best ``count``, and the tree's depth."""
    ranked = sorted(candidates, key=lambda c: (-c.score, c.flat))[:count]
    chosen = sorted(ranked, key=lambda c: c.flat)
    number = {c.flat: 1 + i for i, c in enumerate(chosen)}
    parents = [0 if c.parent is None else number[c.parent] for c in chosen]
    return [c.token for c in chosen], parents, max((len(c.path) for c in chosen), default=0)


def chain(best: Best, count: int) -> list[int]:
    """The likeliest continuation, a token at a time."""
    path: tuple[int, ...] = ()
    while len(path) < count:
        path = (*path, best(path)[0][0])
    return list(path)
