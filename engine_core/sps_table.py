"""SPS, steps per second: what a verify step costs by its size, read from SGLang's JSON files.

Two forms. The step table has steps a second by batch tokens, a staircase. The additive one has
seconds: a bias, a part by requests and a part by batch tokens, linear between probes. N requests
with B extra tokens are N + B batch tokens: each request verifies its anchor at least.
"""

from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np

from ..cython_ext.verify_books import StepCosts
from .step_times import F64
from .table_files import (
    TableError,
    check_length,
    check_rising,
    check_sizes,
    decode_table,
    read_bytes,
)

Number = int | float
_MOST_SECONDS = 1e9


class SpsTable(Protocol):
    """Either form."""

    @property
    def costs(self) -> StepCosts:
        """What the planner's compiled search reads."""
        ...

    def seconds(self, requests: int, batch_tokens: int) -> float:
        """One step's."""
        ...


class StepTable(msgspec.Struct, frozen=True, dict=True):
    """Form A: a step of m tokens runs at the rate of the largest probe that is m or less, or at
    the first one's. Raises TableError.
    """

    sample_batch_tokens: tuple[int, ...]
    sample_steps_per_sec: tuple[float, ...]
    max_batch_tokens: int

    def __post_init__(self) -> None:
        probes = self.sample_batch_tokens
        check_rising("sample_batch_tokens", probes, 1)
        rates = self.sample_steps_per_sec
        check_length("sample_steps_per_sec", rates, "sample_batch_tokens", len(probes))
        for value in rates:
            if not 0.0 < value < float("inf"):
                raise TableError(f"sample_steps_per_sec: {value} is not above 0 and finite")
        check_sizes("sample_batch_tokens", probes)
        if self.max_batch_tokens < probes[-1]:
            raise TableError(
                f"max_batch_tokens: {self.max_batch_tokens} is below the last probe, {probes[-1]}"
            )

    def seconds(self, requests: int, batch_tokens: int) -> float:
        """See ``SpsTable``."""
        return self.costs.seconds(requests, batch_tokens)

    @cached_property
    def costs(self) -> StepCosts:
        """See ``SpsTable``."""
        return StepCosts(_floats(self.sample_batch_tokens), _floats(self.sample_steps_per_sec))


class AdditiveTable(msgspec.Struct, frozen=True, dict=True):
    """Form B: seconds of a step = bias + alpha at N requests + theta at N + B tokens, each linear
    between its probes and constant beyond them. Raises TableError.
    """

    bias_seconds: float
    bs_probes: tuple[Number, ...]
    alpha_seconds: tuple[float, ...]
    m_probes: tuple[Number, ...]
    theta_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0.0 < self.bias_seconds < float("inf"):
            raise TableError(f"bias_seconds: {self.bias_seconds} is not above 0 and finite")
        parts = (
            ("bs_probes", self.bs_probes, "alpha_seconds", self.alpha_seconds),
            ("m_probes", self.m_probes, "theta_seconds", self.theta_seconds),
        )
        for probes, sizes, field, seconds in parts:
            check_rising(probes, sizes, 0)
            check_length(field, seconds, probes, len(sizes))
            check_sizes(probes, sizes)
            if not bool(np.isfinite(seconds).all()):
                raise TableError(f"{field}: some values are not finite")
            for value in (self.bias_seconds, *seconds):
                if abs(value) > _MOST_SECONDS:
                    raise TableError(f"{field}: {value} s are no time of a step")
        least = self.bias_seconds + min(self.alpha_seconds) + min(self.theta_seconds)
        if least <= 0.0:
            raise TableError(
                "bias_seconds: with the least alpha_seconds and theta_seconds a step takes "
                f"{least} s; must be above 0"
            )

    def seconds(self, requests: int, batch_tokens: int) -> float:
        """See ``SpsTable``."""
        return self.costs.seconds(requests, batch_tokens)

    @cached_property
    def costs(self) -> StepCosts:
        """See ``SpsTable``."""
        return StepCosts(
            _floats(self.m_probes),
            _floats(self.theta_seconds),
            _floats(self.bs_probes),
            _floats(self.alpha_seconds),
            self.bias_seconds,
        )


# What holds without a file: no step takes longer than another, so everything is verified.
UNKNOWN = StepTable((1,), (1.0,), 1)


def read_sps(path: str) -> StepTable | AdditiveTable:
    """The table of a file of either form. Raises TableError naming file and field."""
    data = read_bytes(path)
    # Which form a file has, SGLang takes from its text.
    if b'"bias_seconds"' in data:
        return decode_table(path, data, AdditiveTable)
    return decode_table(path, data, StepTable)


def _floats(values: tuple[Number, ...]) -> F64:
    return np.array(values, dtype=np.float64)
