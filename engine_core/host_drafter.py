"""Drafters that propose on the host from committed text (late-bound steps)."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class HostProposal(NamedTuple):
    """Draft trees of R rows, at most N nodes each, the bonus token not counted.

    Nodes stand breadth-first, siblings in rank order, zeros behind them. The arrays are buffers of
    the drafter: valid until its next call.
    """

    counts: NDArray[np.int32]  # [R] nodes of the row
    tokens: NDArray[np.int32]  # [R, N]
    parents: NDArray[np.int32]  # [R, N] 0: the bonus token, i + 1: node i of the row
    match_len: NDArray[np.int32]  # [R] tokens of the longest suffix that has continuations
    weights: NDArray[np.float32]  # [R, N] estimated probability that the node is accepted


@runtime_checkable
class HostDrafter(Protocol):
    """What the scheduler asks of a host drafter. Slots are those of running requests."""

    def open(
        self, slot: int, namespace: str, prompt: NDArray[np.int32], learn: bool = True
    ) -> None:
        """A request enters a slot with its text so far.

        `learn=False` says that the text was read before (a retracted request returns).
        """

    def extend(
        self, slots: NDArray[np.int32], cu: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> None:
        """Row r committed `tokens[cu[r]:cu[r + 1]]`; once a step."""

    def close(self, slot: int) -> None:
        """The request left its slot."""

    def propose(self, slots: NDArray[np.int32], caps: NDArray[np.int32]) -> HostProposal:
        """A draft tree of at most `caps[r]` nodes for each slot."""

    def flush(self) -> None:
        """Forget learned text; open slots keep their context."""

    @property
    def node_count(self) -> int:
        """Nodes of learned text, for metrics."""
