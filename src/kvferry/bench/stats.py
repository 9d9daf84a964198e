"""Repeated measurements of one thing, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes; a machine that is shared makes a mean meaningless.

    >>> Spread.of([3.0, 1.0, 2.0, 9.0])
    Spread(median=2.5, low=1.0, high=9.0)
    """

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(float(np.median(values)), float(min(values)), float(max(values)))


def percentile(values: Sequence[float], q: float) -> float:
    """The value that `q` percent do not exceed, one that was measured.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 99)
    4.0
    """
    return float(np.percentile(values, q, method="inverted_cdf"))
