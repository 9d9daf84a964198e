"""Costs from timings: how long each piece of work takes, when a timing is a sum of many.

A timing is some number of pieces of several kinds of work. What a piece of each kind costs is found by least
squares in *relative* error: a transfer of 50 µs counts as much as one of 50 ms, since the planner compares
ratios. No cost is below 0. Each timing is a median of repetitions; one that is still too long, by whatever
factor, since somebody else was at work, has a relative error of 1 at most, and bends the rest little.
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
    """Costs, and how well they predict.

    Attributes:
        costs: seconds of a piece of each kind, float64 of shape (kinds,).
        errors: |predicted / measured - 1| of every timing, float64 of shape (n,).
    """

    costs: Floats
    errors: Floats

    @property
    def median_error(self) -> float:
        """Of all timings."""
        return float(np.median(self.errors))

    @property
    def worst_error(self) -> float:
        """Of all timings."""
        return float(self.errors.max())


def fit(work: Floats, seconds: Floats) -> Fit:
    """Fit costs.

    Three descriptors and 300 bytes take 6.3 µs, one and 1,000 bytes 3 µs:

    >>> fit(np.array([[3.0, 300.0], [1.0, 1000.0]]), np.array([6.3e-6, 3e-6])).costs.round(12).tolist()
    [2e-06, 1e-09]

    Args:
        work: pieces of each kind in every timing, float64 of shape (n, kinds).
        seconds: float64 of shape (n,), above 0.
    """
    relative = work / seconds[:, None]
    costs = _not_negative(relative, np.ones(len(seconds)))
    return Fit(costs, np.abs(relative @ costs - 1))


def _not_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares with no coefficient below 0; the kinds are few, so all subsets are tried."""
    kinds = matrix.shape[1]
    best, least = np.zeros(kinds), float(target @ target)
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
