"""Least squares with no negative coefficient, by the active-set method of Lawson and Hanson."""

import numpy as np
import numpy.typing as npt

from .step_times import F64

_ROUNDS = 3  # a coefficient; more are taken only where rounding goes in circles


def fit_nonnegative(design: F64, wanted: F64) -> F64:
    """float64[p], the x >= 0 for which |design @ x - wanted| is least; design float64[n, p]."""
    count = design.shape[1]
    found = np.zeros(count)
    free = np.zeros(count, dtype=bool)  # coefficients that are not held at 0
    tolerance = 1e-12 * float(np.abs(design.T @ wanted).max(initial=0.0))
    for _ in range(_ROUNDS * count):
        pull = np.where(free, -np.inf, design.T @ (wanted - design @ found))
        best = int(np.argmax(pull))
        if pull[best] <= tolerance:
            break
        free[best] = True
        found = _settle(design, wanted, found, free)
    return found


def _settle(design: F64, wanted: F64, start: F64, free: npt.NDArray[np.bool_]) -> F64:
    """From ``start`` towards the best of the ``free`` ones; those that would pass 0 are held."""
    while True:
        best = np.zeros_like(start)
        best[free] = np.linalg.lstsq(design[:, free], wanted, rcond=None)[0]
        sinking = free & (best <= 0.0)
        if not sinking.any():
            return best
        way = start[sinking] / np.maximum(start[sinking] - best[sinking], 1e-300)
        start = start + float(way.min()) * (best - start)
        held = sinking.copy()
        held[sinking] = way <= way.min()
        start[held] = 0.0
        free &= ~held
