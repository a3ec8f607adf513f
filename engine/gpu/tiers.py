"""The sizes that CUDA graphs are captured for; a step runs in the smallest that holds it."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from ...engine_core.draft_config import SpecShape

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64)


class Tier(NamedTuple):
    """A graph's capacity: rows, query tokens, and the most query tokens of a row.

    ``sampled``: whether acceptance draws with noise where a row asks for it. ``edits``: whether
    logits are penalised, biased or masked where a row asks for it.
    """

    rows: int
    tokens: int
    width: int
    sampled: bool
    edits: bool = False


def pass_sizes(tiers: Iterable[Tier], shape: SpecShape) -> set[int]:
    """The numbers of tokens of a draft model's passes in steps of ``tiers``.

    Over all that a step accepted, over a token a row, and over the first levels of trees.
    """
    sizes = set()
    for tier in tiers:
        sizes |= {tier.tokens, tier.rows}
        if shape.topk > 1 and tier.width > 1:
            sizes |= {tier.rows * shape.topk * level for level in range(1, shape.steps)}
    return sizes


def ladder(top: int) -> tuple[int, ...]:
    """Sizes up to and including ``top``: steps of at most a half, and of a third from 32 on."""
    sizes = [size for size in _SMALL if size < top]
    size = 96
    while size < top:
        sizes.append(size)
        size += max(32, size // 3 // 32 * 32)
    return (*sizes, top)


class Tiers:
    """All tiers of an engine: ``max_rows`` verify rows of up to ``width`` query tokens."""

    def __init__(self, max_rows: int, width: int) -> None:
        self.max_rows = max_rows
        self.width = width
        self._rows = ladder(max_rows)
        self._tokens = ladder(max_rows * width)

    def of(self, rows: int, tokens: int, sampled: bool, edits: bool = False) -> Tier | None:
        """The tier of a step of verify rows; None for more rows than any graph has."""
        if rows > self.max_rows:
            return None
        room = self._rows[bisect_left(self._rows, rows)]
        if tokens == rows:  # no drafts
            return Tier(room, room, 1, sampled, edits)
        size = self._tokens[bisect_left(self._tokens, tokens)]
        return self._wide(room, size, sampled)._replace(edits=edits)

    def all(self, sampled: bool = False) -> tuple[Tier, ...]:
        """Every tier that a step may need, the largest first (so that memory is reused)."""
        found: set[Tier] = set()
        for fewer, rows in itertools.pairwise((0, *self._rows)):
            found.add(Tier(rows, rows, 1, sampled))
            if self.width > 1:
                # The least that drafts can be: one, of the fewest rows that need this tier.
                first = bisect_left(self._tokens, fewer + 2)
                last = bisect_left(self._tokens, rows * self.width)
                found.update(self._wide(rows, size, sampled) for size in self._tokens[first:last])
                found.add(self._wide(rows, rows * self.width, sampled))
        return tuple(sorted(found, reverse=True))

    def _wide(self, rows: int, tokens: int, sampled: bool) -> Tier:
        return Tier(rows, min(max(tokens, rows), rows * self.width), self.width, sampled)
