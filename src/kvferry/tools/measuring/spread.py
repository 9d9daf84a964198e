"""Summarize repeated measurements: median, extremes and percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the lowest and the highest of several measured values.

    >>> Spread.of([3.0, 1.0, 2.0, 9.0])
    Spread(median=2.5, low=1.0, high=9.0)
    """

    # There is no mean, because a single slow round on a shared machine would dominate it.
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the median, the lowest and the highest of at least one value."""
        return Spread(float(np.median(values)), float(min(values)), float(max(values)))


def percentile(values: Sequence[float], q: float) -> float:
    """Return the smallest value v such that at least `q` percent of the values are at most v.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 99)
    4.0
    """
    return float(np.percentile(values, q, method="inverted_cdf"))
