from typing import final

import numpy as np
from numpy.typing import NDArray

@final
class StepCosts:
    """What a step of so many requests and tokens costs, by probes that rise.

    Without `requests`, `values` [n] are steps a second at `tokens` [n] and sizes: those of the
    largest probe within a step, or of the first. With `requests` [m] and `request_seconds` [m]
    they are seconds: a step takes `bias` and both parts, each linear between its probes and
    constant beyond them. ValueError names an array that does not fit.
    """

    def __new__(
        cls,
        tokens: NDArray[np.float64],
        values: NDArray[np.float64],
        requests: NDArray[np.float64] | None = None,
        request_seconds: NDArray[np.float64] | None = None,
        bias: float = 0.0,
    ) -> StepCosts: ...
    def seconds(self, requests: int, batch_tokens: int) -> float:
        """One step's."""

@final
class VerifyBooks:
    """Confidence of verify steps, which comes back late, and budgets that follow from it.

    A step goes by the confidence of the one `lag` before, counted over steps with room for drafts.
    Of up to `gamma` drafts a request, the first `limit` may be verified, and those of a survival
    of `eps` or more. ValueError names what does not fit.

    `sizes` int32 [n], rising: a step of verify rows alone runs, and costs, as the first of these
    that holds it, or as full rows of the first that holds its rows, if that is less. One whose full
    rows the last of them does not hold runs in its exact size, as all do without any.
    """

    def __new__(
        cls, slots: int, gamma: int, lag: int, limit: int, eps: float, sizes: bytes = b""
    ) -> VerifyBooks: ...
    def start(self, slot: int) -> None:
        """A new request enters the slot."""

    def plan(
        self,
        slots: bytes,
        q_caps: bytes,
        batch_tokens: int,
        costs: StepCosts | None = None,
        forced: int = -1,
    ) -> tuple[int, int, float, float] | None:
        """The budget of the next step, of rows `slots` int32 [V] with `q_caps` int32 [V] tokens.

        It is the first one of the best rate by `costs`, or `forced` if that is not -1, for a step
        of `batch_tokens` without any draft. A row whose request did not draft in the step that
        this one goes by counts as sure. Returns (drafts to verify, candidates, seconds, tokens a
        second); None without costs, without a step to go by, and without room for drafts, where
        nothing is counted. RuntimeError if the confidence should be in and is not.
        """

    def take(self, q_caps: bytes, rows: int, confidence: bytes) -> None:
        """The oldest step's confidence float32 [D, gamma]: of its `rows` verify rows, which come
        first in `q_caps`, those with room for drafts. NaN promises nothing.

        RuntimeError if no step waits for it.
        """

    def survivals_of(self, slot: int) -> list[float]:
        """Survivals by which the slot's request is planned next; [] where it counts as sure."""
