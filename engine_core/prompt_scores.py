"""The log-probabilities of a request's own prompt, gathered chunk by chunk over retractions.

The token at position p is scored by the logits of position p - 1, so position 0 has none, and a
request that wants scores computes every position from the one before its first.
"""

from collections.abc import Sequence
from typing import final

from .plan import TokenLogprobs


def scored(first: int, prompt_len: int, start: int, end: int) -> range:
    """Prompt positions from ``first`` on that a chunk over positions [start, end) scores."""
    return range(max(first, start + 1), max(first, start + 1, min(prompt_len, end + 1)))


@final
class PromptScores:
    """Scores of prompt positions from ``start`` (1 at least) on. ``next``: the first missing."""

    def __init__(self, start: int, prompt_len: int) -> None:
        self.next = max(1, start)
        self._prompt_len = prompt_len
        self._entries: list[TokenLogprobs] = []

    @property
    def missing(self) -> bool:
        """Whether a chunk has still to give some."""
        return self.next < self._prompt_len

    @property
    def cacheable(self) -> int | None:
        """Most tokens that may come from the cache; None for any number."""
        return self.next - 1 if self.missing else None

    def add(self, start: int, end: int, entries: Sequence[TokenLogprobs]) -> None:
        """Take what a chunk over positions [start, end) gave. Raises ValueError for a gap."""
        due = scored(self.next, self._prompt_len, start, end)
        if len(entries) != len(due):
            raise ValueError(f"{len(entries)} scores of the prompt where {len(due)} were due")
        if due:
            self._entries += entries
            self.next = due.stop

    def take(self) -> tuple[TokenLogprobs, ...]:
        """All of them, once, when none is missing; empty before and after."""
        if self.missing or not self._entries:
            return ()
        entries = tuple(self._entries)
        self._entries.clear()
        return entries
