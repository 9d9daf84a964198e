"""Median, extremes and percentiles of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest value.

    >>> Spread.of([3.0, 1.0, 2.0, 9.0])
    Spread(median=2.5, low=1.0, high=9.0)
    """

    # No mean: one slow round on a shared machine would decide it.
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return Spread(float(np.median(values)), float(min(values)), float(max(values)))


def percentile(values: Sequence[float], q: float) -> float:
    """Return the measured value that `q` percent of `values` do not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 99)
    4.0
    """
    return float(np.percentile(values, q, method="inverted_cdf"))
