from typing import final

import numpy as np
from numpy.typing import NDArray

def row_caps(
    room: NDArray[np.int32], width: int, refused: int, full: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8], int]:
    """Draft caps [V] of rows with `room` [V] for drafts, at most `width`; why a row has none, uint8
    [V]: `refused` where its room is below 0, else `full` (0 for the others); how many have some.
    """

@final
class LengthPolicy:
    """Acceptance of draft trees, learned per slot and over all, and the choice of nodes to verify.

    `slots` request slots, trees of at most `width` nodes. Every array is C-contiguous.
    ValueError names a shape, a slot or a tree that does not fit.
    """

    def __new__(cls, slots: int, width: int) -> LengthPolicy: ...
    def start(self, slot: int) -> None:
        """Forget the slot's former request."""

    def fade(self, slots: NDArray[np.int32], kept: float) -> None:
        """Trust what the slots' requests ([R]) were alike themselves by a factor less."""

    def offer(
        self,
        slots: NDArray[np.int32],
        counts: NDArray[np.int32],
        match_lens: NDArray[np.int32],
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        weights: NDArray[np.float32],
    ) -> None:
        """Take the trees ([R, N], breadth-first, siblings best first) that continue slots' text.

        `weights` is the path's frequency share, `match_lens` [R] the longest matched context.
        """

    def learn(
        self,
        slots: NDArray[np.int32],
        lens: NDArray[np.int32],
        tokens: NDArray[np.int32],
    ) -> None:
        """Compare the offered trees with what the target emitted (`lens` [R] tokens a row)."""

    def learn_held(
        self,
        slots: NDArray[np.int32],
        caps: NDArray[np.int32],
        held: NDArray[np.int32],
    ) -> None:
        """Learn that of the first `caps` [R] nodes of the offered chains `held` [R] were emitted.

        Nothing where the cap is 0 or no chain was offered since the slot's last `learn`.
        """

    def select(
        self,
        slots: NDArray[np.int32],
        caps: NDArray[np.int32],
        batch_tokens: int,
        rows: int,
        times: NDArray[np.float64],
        sunk: float,
        extra: float,
        fresh: bool,
    ) -> tuple[int, float, float]:
        """Choose the nodes that make emitted tokens per second greatest.

        A row keeps at most `caps` [R] nodes. `batch_tokens` are the step's tokens without drafts,
        `rows` of them verify rows' own. `times` is T by batch tokens; `sunk` seconds come on top
        of every step, `extra` of one that keeps nodes. With `fresh` only trees offered since the
        last `learn` count.
        Returns (nodes kept, their expected accepted tokens, gain over keeping none: 1.0 = none).
        """

    def select_all(self, slots: NDArray[np.int32], caps: NDArray[np.int32]) -> int:
        """Keep the first `caps` nodes of every fresh tree; returns how many."""

    def write(
        self,
        slots: NDArray[np.int32],
        counts: NDArray[np.int32],
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
    ) -> int:
        """Write what the latest select kept: `counts` [R], flat tokens and row-local parents."""

    def kept_of(self, rows: int) -> NDArray[np.int32]:
        """Nodes of each of the rows [R] that the latest `select` was asked about and kept."""

    def offered(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Write the nodes of the slots' latest trees; -1 for one that was never offered any."""

    def estimates(self, slot: int) -> list[float]:
        """Estimated acceptance probability of each node of the slot's latest tree."""
