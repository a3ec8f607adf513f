from typing import final

import numpy as np
from numpy.typing import NDArray

@final
class SuffixAutomaton:
    """Every substring of a corpus with the tokens that follow it, counted and dated.

    Built by `extend` and `separator`, closed by `finalize`; only then can it `propose`. A build
    releases the GIL. One thread at a time may use an automaton.
    """

    def __new__(cls) -> SuffixAutomaton: ...
    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Append `tokens` [n] to the current document.

        ValueError: finalized, negative token, too many tokens. MemoryError: not usable afterwards.
        """

    def separator(self) -> None:
        """End the document: nothing is proposed across a separator. It counts as a token."""

    def finalize(self) -> None:
        """Count occurrences, sort the children, drop what only building needs. Once."""

    def propose(
        self,
        contexts: NDArray[np.int32],
        lengths: NDArray[np.int32],
        caps: NDArray[np.int32],
        match_type: int,
        min_breadth: int,
        max_breadth: int,
        counts_out: NDArray[np.int32],
        tokens_out: NDArray[np.int32],
        parents_out: NDArray[np.int32],
        match_len_out: NDArray[np.int32],
        weights_out: NDArray[np.float32],
    ) -> None:
        """Write a draft tree of at most `caps[r]` nodes for each context.

        `contexts` [R, max_depth]: the last tokens, oldest first, `lengths` [R] of them. Output as
        `NgramTrie.propose`; BFS ranks by the latest occurrence in the corpus. Rows with a cap of
        0 are skipped: count and match length 0, the other arrays untouched.
        """

    @property
    def states(self) -> int:
        """States, the start included."""

    @property
    def tokens(self) -> int:
        """Tokens read, separators included."""

    @property
    def finalized(self) -> bool:
        """Whether the text is closed."""

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated."""
