"""Fit costs to timings by least squares.

The model of a timing is the number of pieces of work of each kind, times the cost of that kind. The fit
minimizes the *relative* error, because the planner compares ratios: a transfer of 50 µs counts as much as one
of 50 ms. No cost is negative. Each timing is a median of repetitions. A timing that is still too long because
the machine was busy has a relative error of at most 1, so it changes the fit little.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The costs that were fitted to timings, and the errors of the fit.

    Attributes:
        costs: seconds per piece of work of each kind, float64 of shape (kinds,).
        errors: relative error of each predicted timing, |predicted / measured - 1|, float64 of shape
            (timings,).
    """

    costs: Floats
    errors: Floats

    @property
    def median_error(self) -> float:
        return float(np.median(self.errors))

    @property
    def worst_error(self) -> float:
        return float(self.errors.max())


def fit(work: Floats, seconds: Floats) -> Fit:
    """Fit the cost of each kind of work to timings, by least squares of the relative errors.

    For example, three descriptors with 300 bytes together take 6.3 µs, and one descriptor with 1,000 bytes
    takes 3 µs. So a descriptor costs 2 µs, and a byte costs 1 ns:

    >>> fit(np.array([[3.0, 300.0], [1.0, 1000.0]]), np.array([6.3e-6, 3e-6])).costs.round(12).tolist()
    [2e-06, 1e-09]

    Args:
        work: number of pieces of work of each kind, for each timing, float64 of shape (n, kinds).
        seconds: measured timings, float64 of shape (n,); all are positive.
    """
    # Dividing each row by its time turns the absolute error into the relative one.
    relative = work / seconds[:, None]
    costs = _not_negative(relative, np.ones(len(seconds)))
    return Fit(costs, np.abs(relative @ costs - 1))


def _not_negative(matrix: Floats, target: Floats) -> Floats:
    """Return x of shape (kinds,), without negative elements, that minimizes ``|matrix @ x - target|``."""
    kinds = matrix.shape[1]
    best, least = np.zeros(kinds), float(target @ target)
    # With few kinds, trying every subset of columns, with zeros for the others, is exact and quick.
    for chosen in chain.from_iterable(combinations(range(kinds), n) for n in range(1, kinds + 1)):
        part, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
        if (part < 0).any():
            continue
        found = np.zeros(kinds)
        found[list(chosen)] = part
        left = matrix @ found - target
        if float(left @ left) < least:
            best, least = found, float(left @ left)
    return best
