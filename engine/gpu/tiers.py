"""The sizes that CUDA graphs are captured for; a step runs in the smallest that holds it."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from ...engine_core.draft_config import BlockConfig, SpecShape
from ...engine_core.graph_sizes import CHUNK_ROWS, chunk_rows, chunk_tiers, chunk_tokens, ladder


class Tier(NamedTuple):
    """A graph's capacity: verify rows, query tokens, and the most query tokens of such a row.

    ``sampled``: whether acceptance draws with noise where a row asks for it. ``edits``: whether
    logits are penalised, biased or masked where a row asks for it; ``masked``: by grammars or by
    custom processors too. ``chunks``: prefill rows behind the verify rows, whose tokens are among
    the ``tokens``: ``longest`` at most, which may all be of one row. ``compact``: ``tokens`` are
    those that are verified; planned are full rows.
    ``drafts``: of all verify rows, where they are fewer than full rows'.
    """

    rows: int
    tokens: int
    width: int
    sampled: bool
    edits: bool = False
    chunks: int = 0
    longest: int = 0
    compact: bool = False
    masked: bool = False
    drafts: int | None = None

    @property
    def planned(self) -> int:
        """Query tokens that the step's plan may have."""
        return self.rows * self.width + self.longest if self.compact else self.tokens

    @property
    def all_rows(self) -> int:
        """Verify rows and prefill rows."""
        return self.rows + self.chunks

    @property
    def nodes(self) -> int:
        """Query tokens whose logits count: all of verify rows, and a prompt's last one."""
        return min(self.tokens, _verified(self.rows, self.width, self.drafts) + self.chunks)


class Prefill(NamedTuple):
    """The prefill rows of a step: how many, and their tokens."""

    rows: int
    tokens: int


NO_PREFILL = Prefill(0, 0)


def pass_sizes(tiers: Iterable[Tier], shape: SpecShape) -> set[int]:
    """The numbers of tokens of a draft model's passes in steps of ``tiers``.

    Over all that a step accepted, over a token a row, and over the first levels of trees.
    """
    sizes = set()
    for tier in tiers:
        sizes |= {tier.tokens, tier.all_rows}
        if shape.topk > 1 and tier.width > 1:
            sizes |= {tier.all_rows * shape.topk * level for level in range(1, shape.steps)}
    return sizes


def block_sizes(tiers: Iterable[Tier], block: BlockConfig) -> set[int]:
    """The numbers of tokens of a block draft's passes in steps of ``tiers``.

    Injection of all that the target ran, the blocks and their drafts, and a draft of every row.
    """
    sizes = set()
    for tier in tiers:
        sizes.add(tier.tokens)
        if tier.width > 1:
            rows = tier.all_rows
            sizes |= {min(rows * block.rows, tier.tokens), rows * block.drafts, rows}
    return sizes


class Tiers:
    """All tiers of an engine: ``max_rows`` verify rows of up to ``width`` query tokens, and the
    same beside up to ``chunk`` prompt tokens. ``compact``: rows with drafts are drafted in full and
    verified in part, so that a tier's tokens are no bound on what is drafted. ``drafts``: most of
    all rows together; as many as the rows have room for if not given.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        chunk: int = 0,
        compact: bool = False,
        drafts: int | None = None,
    ) -> None:
        self._compact = compact
        self._drafts = drafts
        self.max_rows = max_rows
        self.width = width
        self._chunk = chunk
        self._rows = ladder(max_rows)
        self._tokens = ladder(_verified(max_rows, width, drafts))
        self._chunk_rows = chunk_rows(max_rows)

    def of(
        self,
        rows: int,
        tokens: int,
        sampled: bool,
        edits: bool = False,
        prefill: Prefill = NO_PREFILL,
        drafts: bool | None = None,
    ) -> Tier | None:
        """The tier of a step of verify rows, with their tokens, and maybe prefill rows.

        ``drafts``: whether any are planned, if not as many as ``tokens`` say. None for more rows or
        more of a prompt than any graph has.
        """
        plain = tokens == rows if drafts is None else not drafts
        if rows > self.max_rows:
            return None
        if prefill.rows:
            return self._mixed(rows, tokens, sampled, edits, prefill, plain)
        room = self._rows[bisect_left(self._rows, rows)]
        if plain:
            return Tier(room, room, 1, sampled, edits)
        size = self._tokens[bisect_left(self._tokens, tokens)]
        return self._wide(room, size, sampled, edits)

    def all(self, sampled: bool = False) -> tuple[Tier, ...]:
        """Every tier of verify rows alone, the largest first (so that memory is reused)."""
        found: set[Tier] = set()
        for fewer, rows in itertools.pairwise((0, *self._rows)):
            found.add(Tier(rows, rows, 1, sampled))
            if self.width > 1:
                # The least that drafts can be: one, of the fewest rows that need this tier; none
                # where a budget may leave none.
                first = bisect_left(self._tokens, fewer + (1 if self._compact else 2))
                last = bisect_left(self._tokens, rows * self.width)
                found.update(self._wide(rows, size, sampled) for size in self._tokens[first:last])
                found.add(self._wide(rows, rows * self.width, sampled))
        return tuple(sorted(found, reverse=True))

    def mixed(self, sampled: bool = False) -> tuple[Tier, ...]:
        """Every tier of steps with prefill rows, the largest first."""
        if not self._chunk:
            return ()
        found = {
            self._with_chunks(rows, tokens, width, sampled, False)
            for width in {1, self.width}
            for rows, tokens in chunk_tiers(self.max_rows, width, self._chunk)
        }
        return tuple(sorted(found, key=lambda tier: (tier.tokens, tier), reverse=True))

    def _wide(self, rows: int, tokens: int, sampled: bool, edits: bool = False) -> Tier:
        size = min(max(tokens, rows), _verified(rows, self.width, self._drafts))
        compact, drafts = self._compact, self._drafts
        return Tier(rows, size, self.width, sampled, edits, compact=compact, drafts=drafts)

    def _mixed(
        self,
        rows: int,
        tokens: int,
        sampled: bool,
        edits: bool,
        prefill: Prefill,
        plain: bool,
    ) -> Tier | None:
        if prefill.rows > CHUNK_ROWS or prefill.tokens > self._chunk:
            return None
        room = self._chunk_rows[bisect_left(self._chunk_rows, rows)]
        width = 1 if plain else self.width
        sizes = chunk_tokens(_verified(room, width, self._drafts) + self._chunk)
        size = sizes[bisect_left(sizes, tokens + prefill.tokens)]
        return self._with_chunks(room, size, width, sampled, edits)

    def _with_chunks(self, rows: int, tokens: int, width: int, sampled: bool, edits: bool) -> Tier:
        longest = min(tokens, self._chunk)
        chunks = min(CHUNK_ROWS, longest)
        compact, drafts = self._compact and width > 1, self._drafts if width > 1 else None
        return Tier(rows, tokens, width, sampled, edits, chunks, longest, compact, drafts=drafts)


def _verified(rows: int, width: int, drafts: int | None) -> int:
    """Query tokens of full verify rows, or with no more than so many drafts."""
    return rows * width if drafts is None else min(rows * width, rows + drafts)
