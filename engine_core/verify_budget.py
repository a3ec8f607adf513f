"""How many drafts a step verifies in all, by survival and cost: what emits most a second.

A draft's survival S is the chance that it and all before it of its request are accepted, so a step
of N requests that verifies the B likeliest drafts emits tau(B) = N + the sum of their survivals.
Survival never rises along a request, so the B likeliest are a prefix of each request's drafts. The
rate tau(B) / T(N, B) has several peaks where T is a staircase: every B is looked at. The search is
compiled (``cython_ext/verify_books.pyx``), for it is on the host's way to every step.
"""

import math
from typing import NamedTuple

import msgspec


class VerifyRules(msgspec.Struct, frozen=True, kw_only=True):
    """``gamma`` drafts a request. ``max_verify_len`` 0 stands for gamma + 1; drafts at positions
    from it on are never verified. Drafts of survival below ``eps`` count as none.

    Raises ValueError naming the field.
    """

    gamma: int
    min_verify_len: int = 1
    max_verify_len: int = 0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"gamma: must be 1 or more, got {self.gamma}")
        most = self.gamma + 1
        if not 0 <= self.max_verify_len <= most:
            raise ValueError(f"max_verify_len: must be 0 to {most}, got {self.max_verify_len}")
        if not 0 <= self.min_verify_len <= (self.max_verify_len or most):
            raise ValueError(
                f"min_verify_len: must be 0 to {self.max_verify_len or most}, "
                f"got {self.min_verify_len}"
            )
        if not 0.0 <= self.eps < math.inf:
            raise ValueError(f"eps: must be 0 or more, got {self.eps}")

    @property
    def limit(self) -> int:
        """Drafts of a request that may be verified."""
        return min(self.max_verify_len or self.gamma + 1, self.gamma)


class VerifyBudget(NamedTuple):
    """``drafts`` of all rows together, of ``candidates``; ``seconds``: predicted of the step,
    ``rate``: tokens a second.
    """

    drafts: int
    candidates: int
    seconds: float
    rate: float


def forced_budget(fraction: float, requests: int, gamma: int) -> int:
    """``fraction`` of all drafts, for measuring; 0 at least."""
    return max(0, int(fraction * requests * gamma))


def needed_tokens(drafts: int, requests: int, rules: VerifyRules) -> int:
    """Tokens that a step of this budget needs room for."""
    least = requests * max(rules.min_verify_len, 1)
    return min(least + drafts, requests * (rules.gamma + 1))


def filled_budget(room: int, requests: int, gamma: int) -> int:
    """The budget that makes drafts of all the ``room`` tokens that a step runs in anyway."""
    return max(0, min(room, requests * (gamma + 1)) - requests)
