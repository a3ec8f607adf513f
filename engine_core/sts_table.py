"""STS, sequential temperature scaling: what makes a confidence head's survival a probability.

A head's raw logit at draft position k becomes sigmoid(logit / T_k), the chance that the draft there
is accepted if all before it were. A request's survival at k is the product of these up to k. The
file is SGLang's JSON; the fit takes one position after the other, each on the survival that the
temperatures before it give.
"""

import math
from typing import final

import msgspec
import numpy as np

from .ids import F32
from .step_times import F64
from .table_files import TableError, check_length, decode_table, read_bytes

STS_FILE = "sts.json"  # where a draft's folder has it
BINS = 15
_GRID: F64 = np.logspace(-1.0, 1.0, 41)  # temperatures that a fit tries; the middle one is 1.0
_CLAMP = 1e-8


class StsTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """One temperature a draft position; ``ece_before``, ``ece_after``: expected calibration error
    of the survival there, with all temperatures 1 and with these.

    Raises TableError.
    """

    temperatures: tuple[float, ...]
    dataset: str | None = None
    num_samples: int | None = None
    ece_before: tuple[float, ...] | None = None
    ece_after: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise TableError("temperatures: is empty; one for each draft position is needed")
        for position, value in enumerate(self.temperatures):
            if not 0.0 < value < math.inf:
                raise TableError(f"temperatures: {value} at position {position} is not above 0")
        for field in ("ece_before", "ece_after"):
            values: tuple[float, ...] | None = getattr(self, field)
            if values is not None:
                check_length(field, values, "temperatures", len(self.temperatures))

    @property
    def gamma(self) -> int:
        """The number of draft positions."""
        return len(self.temperatures)


def identity_sts(gamma: int) -> StsTable:
    """What holds without a file: confidence is the sigmoid of the raw logit."""
    return StsTable((1.0,) * gamma)


def read_sts(path: str, gamma: int) -> StsTable:
    """The table for a draft of ``gamma`` positions. Raises TableError naming file and field."""
    table = decode_table(path, read_bytes(path), StsTable)
    if table.gamma != gamma:
        raise TableError(
            f"{path}: temperatures: {table.gamma} of them for {gamma} draft positions; fit a table "
            "for this draft with `outrider profile sts`"
        )
    return table


def confidence(logits: F32 | F64, temperatures: float | F64) -> F64:
    """Acceptance probability of raw logits [..., gamma]; temperatures [gamma] or one for all."""
    scaled = np.asarray(logits, dtype=np.float64) / temperatures
    # The exponential of a number that is never positive cannot overflow.
    shrunk = np.exp(-np.abs(scaled))
    return np.asarray(np.where(scaled >= 0, 1.0, shrunk) / (1.0 + shrunk), dtype=np.float64)


def calibration_error(chances: F64, accepted: F64, bins: int = BINS) -> float:
    """Mean over samples [n] of |mean chance - share accepted| of their equal-width bin of [0, 1].

    A bin has its lower edge; chances are clamped to [1e-8, 1 - 1e-8].
    """
    clamped = np.clip(chances, _CLAMP, 1.0 - _CLAMP)
    places = np.minimum((clamped * bins).astype(np.int64), bins - 1)
    # A bin's |mean - mean| x count is the |difference of its sums|.
    gaps = np.bincount(places, weights=clamped - accepted, minlength=bins)
    return float(np.abs(gaps).sum() / len(clamped))


@final
class _Position:
    """One draft position's samples."""

    def __init__(self, logits: F64, accepted: F64, bins: int) -> None:
        self._logits = logits
        self._accepted = accepted
        self._bins = bins

    def survival(self, before: F64, temperature: float) -> F64:
        return before * confidence(self._logits, temperature)

    def error(self, before: F64, temperature: float) -> float:
        return calibration_error(self.survival(before, temperature), self._accepted, self._bins)


def fit_sts(
    logits: F32 | F64, prefix_mask: F32 | F64, bins: int = BINS, dataset: str | None = None
) -> StsTable:
    """Fit a table to samples: logits [n, gamma], raw; prefix_mask [n, gamma], 1 where the position
    lies within the accepted drafts, else 0.

    Of equal errors the lowest temperature wins. Raises TableError.
    """
    raw = np.asarray(logits, dtype=np.float64)
    mask = np.asarray(prefix_mask, dtype=np.float64)
    _check_samples(raw, mask, bins)
    before = plain = np.ones(len(raw))
    temperatures: list[float] = []
    error_before: list[float] = []
    error_after: list[float] = []
    for k in range(raw.shape[1]):
        position = _Position(raw[:, k], mask[:, k], bins)
        error_before.append(position.error(plain, 1.0))
        plain = position.survival(plain, 1.0)
        errors = [position.error(before, float(t)) for t in _GRID]
        best = int(np.argmin(errors))
        temperatures.append(float(_GRID[best]))
        error_after.append(errors[best])
        before = position.survival(before, temperatures[-1])
    return StsTable(tuple(temperatures), dataset, len(raw), tuple(error_before), tuple(error_after))


def _check_samples(logits: F64, mask: F64, bins: int) -> None:
    if bins < 1:
        raise TableError(f"num_bins: must be 1 or more, got {bins}")
    if logits.ndim != 2 or not logits.shape[1]:
        raise TableError(f"logits: must be [samples, positions], got {list(logits.shape)}")
    if not len(logits):
        raise TableError("logits: there are no samples")
    if mask.shape != logits.shape:
        raise TableError(
            f"prefix_mask: is {list(mask.shape)}, logits are {list(logits.shape)}; must be equal"
        )
    if not np.isfinite(logits).all():
        raise TableError("logits: some are not finite")
    if not np.isin(mask, (0.0, 1.0)).all() or bool((np.diff(mask, axis=1) > 0).any()):
        raise TableError("prefix_mask: each row must be ones, then zeros")
