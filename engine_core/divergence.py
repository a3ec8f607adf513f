"""Where two outputs that should be equal part, and how much lies between them there."""

from collections.abc import Callable, Sequence

import msgspec

TIE_GAP = 1e-4  # of two logits that are equally likely up to rounding, in float32
ENDED = -1  # instead of a token, of an output that has ended

# The gap of two tokens at a position: (position, expected, got) -> by how much the logit of the
# expected one is larger.
GapAt = Callable[[int, int, int], float]


class Divergence(msgspec.Struct, frozen=True):
    """The first difference of an output from what it should be.

    ``gap``: of the two tokens' logits; infinite where one output has ended (``ENDED``).
    """

    prompt: int | str
    position: int
    expected: int
    got: int
    gap: float

    @property
    def tie(self) -> bool:
        """Whether the two tokens are equally likely up to rounding."""
        return abs(self.gap) < TIE_GAP


def first_divergence(
    prompt: int | str, expected: Sequence[int], got: Sequence[int], gap: GapAt
) -> Divergence | None:
    """Where ``got`` leaves ``expected``; None if they are equal. ``gap`` is asked once at most."""
    at = parting(expected, got)
    if at is None:
        return None
    want = expected[at] if at < len(expected) else ENDED
    have = got[at] if at < len(got) else ENDED
    between = float("inf") if ENDED in (want, have) else gap(at, want, have)
    return Divergence(prompt, at, want, have, between)


def parting(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """The first position at which two sequences differ; None if they are equal."""
    for at, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))
