"""Least squares without negative coefficients: the conditions that make a point the best one."""

import numpy as np
import pytest

from outrider.engine_core.nonnegative_fit import fit_nonnegative


def test_a_fit_that_has_no_negative_coefficient_is_the_usual_one() -> None:
    rng = np.random.default_rng(0)
    design, truth = rng.random((20, 4)), np.array([1.0, 0.5, 2.0, 0.25])
    np.testing.assert_allclose(fit_nonnegative(design, design @ truth), truth)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_point_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    design, wanted = rng.normal(size=(30, 12)), rng.normal(size=30)
    if seed % 3 == 0:  # columns that nearly say the same
        design[:, 6:] = design[:, :6] + 1e-6 * design[:, 6:]
    found = fit_nonnegative(design, wanted)
    assert (found >= 0).all()
    pull = design.T @ (wanted - design @ found)
    assert float(pull.max()) < 1e-6
    assert float(np.abs(pull[found > 0]).max(initial=0.0)) < 1e-6
    assert (found == 0).any()  # else it is no more than the usual fit


def test_what_pulls_nowhere_stays_zero() -> None:
    assert fit_nonnegative(np.ones((3, 2)), np.zeros(3)).tolist() == [0.0, 0.0]
    assert fit_nonnegative(np.ones((3, 1)), -np.ones(3)).tolist() == [0.0]
