"""Fitted costs are those that the timings were made of."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.tools.measuring.calibrate import fit

COSTS = np.array([2e-6, 7e-11])
SIZES = 2.0 ** np.arange(9, 23)
COUNTS = np.minimum(8192, (64 << 20) / SIZES)
WORK = np.stack([COUNTS, COUNTS * SIZES], 1)


def test_fit_recovers_costs_from_exact_timings() -> None:
    found = fit(WORK, WORK @ COSTS)
    assert found.costs == pytest.approx(COSTS)
    assert found.worst_error < 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_ten_percent_moves_fitted_costs_by_less(seed: int) -> None:
    noise = 1 + 0.1 * np.random.default_rng(seed).standard_normal(len(WORK))
    found = fit(WORK, WORK @ COSTS * noise)
    assert found.costs == pytest.approx(COSTS, rel=0.1)
    assert found.median_error < 0.12


def test_two_outliers_do_not_change_the_fit() -> None:
    seconds = WORK @ COSTS * (1 + 0.01 * np.random.default_rng(1).standard_normal(len(WORK)))
    seconds[-3:-1] *= 5
    found = fit(WORK, seconds)
    assert found.costs == pytest.approx(COSTS, rel=0.1)
    assert found.worst_error == pytest.approx(0.8, abs=0.03)


def test_a_short_timing_counts_as_much_as_a_long_one() -> None:
    work = np.array([[1.0], [1000.0]])
    assert fit(work, np.array([1e-6, 1100e-6])).costs[0] == pytest.approx(1.05e-6, rel=0.01)


def test_fitted_costs_are_not_negative() -> None:
    work = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    found = fit(work, np.array([3.0, 2.9, 2.8]))
    assert (found.costs >= 0).all()
    assert found.costs[0] == pytest.approx(2.9, rel=0.05)
