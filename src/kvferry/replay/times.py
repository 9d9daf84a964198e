"""A histogram of times in bounded memory, with quantiles that are at most 1 % off."""

from __future__ import annotations

from collections import Counter
from math import ceil, exp, log

_STEP = log(1.02)
_LEAST = 1e-6


class Times:
    """Times in seconds, in classes that are 2 % wide.

    >>> times = Times()
    >>> for number in range(1, 101):
    ...     times.add(number)
    >>> round(times.quantile(0.5)), round(times.mean, 1), len(times)
    (50, 50.5, 100)
    """

    def __init__(self) -> None:
        self._classes: Counter[int] = Counter()
        self._sum, self._count = 0.0, 0

    def __len__(self) -> int:
        """Return the number of times."""
        return self._count

    def add(self, seconds: float) -> None:
        """Add a time. Times below a microsecond count as a microsecond."""
        self._classes[round(log(max(seconds, _LEAST)) / _STEP)] += 1
        self._sum += seconds
        self._count += 1

    @property
    def mean(self) -> float:
        """Mean in seconds; 0 without times."""
        return self._sum / self._count if self._count else 0.0

    def quantile(self, share: float) -> float:
        """Return the time in seconds that a share of all times does not exceed; 0 without times.

        Args:
            share: share of the times, from 0 to 1.
        """
        left = max(ceil(share * self._count), 1)
        for number in sorted(self._classes):
            left -= self._classes[number]
            if left <= 0:
                return exp(number * _STEP)
        return 0.0
