"""What is measured of requests and of a core, and the statistics made of it."""

import statistics
from collections.abc import Sequence

import msgspec

from ...engine_core.messages import CoreStats


class Timing(msgspec.Struct):
    """One request on a monotonic clock, seconds. ``gaps``: time between two chunks divided by
    the later one's tokens, once for every token of it.
    """

    sent: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    gaps: list[float] = []
    error: str | None = None

    def chunk(self, now: float, tokens: int) -> None:
        """Note a chunk of ``tokens`` new tokens."""
        if tokens <= 0:
            return
        if self.first is None:
            self.first = now
            # The first token ends the prefill; what came with it had no gap of its own.
        else:
            self.gaps += [(now - self.last) / tokens] * tokens
        self.last = now
        self.tokens += tokens


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of one quantity, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance over one measurement, from the core's counters.

    ``accept_length`` (tau): tokens of verify rows, bonus included, over request-steps with at
    least one draft; None without such steps. ``accept_rate_per_position[i]``: accepted over
    verified drafts at depth i + 1. ``length_0_share``: decode rows without a draft over all.
    """

    accept_length: float | None
    accept_rate: float | None
    accept_rate_per_position: tuple[float, ...]
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    length_0_share: float


class CoreCost(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the core over one measurement; microseconds of thread CPU time a step.

    ``wait_for_drafts_us``: what the worker waited for late-bound drafts, a step.
    """

    steps: int
    plan_us: float
    commit_us: float
    propose_us: float
    worker_busy_us: float
    wait_for_drafts_us: float


def spread(seconds: Sequence[float]) -> Spread | None:
    """Percentiles of ``seconds`` (nearest rank); None for no samples."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Spread(
        mean=1e3 * statistics.fmean(ordered),
        p50=rank(0.5),
        p90=rank(0.9),
        p99=rank(0.99),
        max=1e3 * ordered[-1],
    )


def speculation(before: CoreStats, after: CoreStats) -> Speculation:
    """Acceptance between two readings of a core's counters."""
    drafts = after.spec_drafts - before.spec_drafts
    proposed = after.spec_draft_tokens - before.spec_draft_tokens
    accepted = after.spec_accepted_tokens - before.spec_accepted_tokens
    emitted = after.spec_verify_tokens - before.spec_verify_tokens
    plain = after.plain_rows - before.plain_rows
    hits = _minus(after.spec_accepted_per_pos, before.spec_accepted_per_pos)
    tries = _minus(after.spec_drafted_per_pos, before.spec_drafted_per_pos)
    return Speculation(
        accept_length=emitted / drafts if drafts else None,
        accept_rate=accepted / proposed if proposed else None,
        accept_rate_per_position=tuple(h / t for h, t in zip(hits, tries, strict=False) if t),
        drafts=drafts,
        draft_tokens=proposed,
        accepted_tokens=accepted,
        length_0_share=plain / (plain + drafts) if plain + drafts else 0.0,
    )


def core_cost(before: CoreStats, after: CoreStats) -> CoreCost:
    """Cost a step between two readings of a core's counters."""
    steps = after.steps - before.steps

    def a_step(name: str) -> float:
        spent: float = getattr(after, name) - getattr(before, name)
        return 1e6 * spent / steps if steps else 0.0

    return CoreCost(
        steps=steps,
        plan_us=a_step("plan_cpu"),
        commit_us=a_step("commit_cpu"),
        propose_us=a_step("propose_cpu"),
        worker_busy_us=a_step("worker_busy"),
        wait_for_drafts_us=a_step("wait_for_drafts"),
    )


def _minus(after: Sequence[int], before: Sequence[int]) -> list[int]:
    padded = [*before, *([0] * (len(after) - len(before)))]
    return [a - b for a, b in zip(after, padded, strict=False)]
