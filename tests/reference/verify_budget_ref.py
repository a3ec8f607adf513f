"""The budget of verify steps by plain numpy: late confidence, candidates, the first best rate."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
# Tokens a second of steps that emit float64[n] tokens, of so many requests, and have float64[n].
Rates = Callable[[F64, int, F64], F64]


def survival(confidence: F32) -> F32:
    """float32[N, gamma] of confidence, rounded after each product."""
    return np.multiply.accumulate(confidence, axis=1, dtype=np.float32)


def step_rates(tokens: list[float], steps_per_sec: list[float]) -> Rates:
    """By the largest probe within a step, or the first one."""

    def rates(expected: F64, _requests: int, sizes: F64) -> F64:
        at = np.maximum(np.searchsorted(np.array(tokens), sizes, side="right") - 1, 0)
        found: F64 = expected * np.array(steps_per_sec)[at]
        return found

    return rates


def additive_rates(
    bias: float,
    requests_at: list[float],
    alpha: list[float],
    tokens_at: list[float],
    theta: list[float],
) -> Rates:
    """Seconds are a bias and two parts, linear between probes and constant beyond."""

    def rates(expected: F64, requests: int, sizes: F64) -> F64:
        fixed = bias + np.interp(requests, requests_at, alpha)
        found: F64 = expected / (fixed + np.interp(sizes, tokens_at, theta))
        return found

    return rates


def run_sizes(wanted: F64, requests: int, width: int, graphs: list[int]) -> F64:
    """What steps of so many tokens run as: the least graph that holds them, or full rows of the
    least that holds the requests. Without one for the requests' full rows as they are.
    """
    if not graphs or requests * width > graphs[-1]:
        return wanted
    full = min(next(size for size in graphs if size >= requests) * width, graphs[-1])
    taken = [
        tokens if tokens > full else min(full, next(size for size in graphs if size >= tokens))
        for tokens in wanted.tolist()
    ]
    return np.array(taken, dtype=np.float64)


class Choice(NamedTuple):
    drafts: int
    candidates: int
    emitted: float


def choose_budget(
    survivals: F32,
    caps: I32,
    rates: Rates,
    limit: int,
    eps: float,
    batch_tokens: int,
    graphs: list[int],
) -> Choice:
    """The first budget of the best rate; ``caps`` int32[N]: most drafts of each row. ``graphs``:
    what steps without prompts run as, see ``run_sizes``."""
    usable = survivals[:, :limit]
    keep = usable >= np.float32(eps)
    keep &= np.arange(usable.shape[1]) < caps[:, None]
    ranked = np.sort(usable[keep])[::-1]
    expected = np.concatenate(([0.0], np.cumsum(ranked, dtype=np.float64))) + len(survivals)
    sizes = np.arange(batch_tokens, batch_tokens + len(expected), dtype=np.float64)
    if batch_tokens == len(survivals):
        sizes = run_sizes(sizes, len(survivals), survivals.shape[1] + 1, graphs)
    drafts = int(np.argmax(rates(expected, len(survivals), sizes)))
    return Choice(drafts, len(ranked), float(expected[drafts]))


class Relay:
    """What is known of each slot's request when a step is planned: the step ``lag`` before."""

    def __init__(self, slots: int, gamma: int, lag: int) -> None:
        self.lag = lag
        self.generations = np.zeros(slots, dtype=np.int64)
        self.confidence = np.zeros((lag, slots, gamma), dtype=np.float32)
        self.recorded = np.zeros((lag, slots), dtype=np.int64)
        self.planned: deque[tuple[I32, npt.NDArray[np.int64]]] = deque()
        self.steps = 0
        self.pushed = 0

    def start(self, slot: int) -> None:
        self.generations[slot] += 1

    def plan(self, slots: I32) -> F32 | None:
        """Survivals float32[N, gamma], 1 where nothing is known; None where no step is."""
        source = self.steps - self.lag
        assert source < self.pushed
        self.planned.append((slots.copy(), self.generations[slots]))
        self.steps += 1
        if source < 0:
            return None
        layer, now = source % self.lag, self.generations[slots]
        known = (now >= 1) & (self.recorded[layer, slots] == now)
        return np.where(known[:, None], survival(self.confidence[layer, slots]), np.float32(1.0))

    def push(self, drafting: npt.NDArray[np.bool_], given: F32) -> None:
        """Confidence [D, gamma] of the rows of the oldest step that drafted, ``drafting`` [N]."""
        slots, generations = self.planned.popleft()
        confidence = np.ones((len(slots), given.shape[1]), dtype=np.float32)
        confidence[drafting] = np.where(np.isnan(given), np.float32(0.0), given)
        layer = self.pushed % self.lag
        self.recorded[layer] = 0
        self.recorded[layer, slots] = generations
        self.confidence[layer, slots] = confidence
        self.pushed += 1
