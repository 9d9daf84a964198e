"""The write budget of a directory: the bytes that may be written per day, so that its disk lasts.

It is a token bucket, as the generic cell rate algorithm keeps it: the state is one time, at which the bucket
would be full again if nothing more were written. So several processes can share it in one number. There is no
clock.
"""

from __future__ import annotations

from dataclasses import dataclass

_DAY_SECONDS = 86_400.0
# The bucket holds the budget of an hour. The rest of a day's budget flows in evenly.
_BURST = 1 / 24
# Time in which an empty bucket fills.
_FILL_SECONDS = _DAY_SECONDS * _BURST / (1 - _BURST)
# Times since 1970 are exact to less than a microsecond.
_ROUNDING = 1e-8


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """A limit on the bytes written per day.

    In no 24 hours are more than `bytes_per_day` written, except for the rest of the last chunk. `full_at` is
    the time in seconds at which the bucket is full again.

    >>> budget = WriteBudget(24_000_000)
    >>> budget.left(0.0)
    1.0
    >>> budget = budget.after_write(900_000, 0.0)
    >>> round(budget.left(0.0), 3), round(budget.left(1800.0), 3)
    (0.1, 0.579)
    """

    bytes_per_day: int
    full_at: float = 0.0

    def left(self, now: float) -> float:
        """Return the share of the bucket that is left, 0 to 1. At 0, nothing may be written."""
        left = 1 - self._missing_seconds(now) / _FILL_SECONDS
        return left if left > _ROUNDING else 0.0

    def after_write(self, size: int, now: float) -> WriteBudget:
        """Return the budget after a write of `size` bytes. The last chunk may take more than is left."""
        seconds = size / (self.bytes_per_day * _BURST) * _FILL_SECONDS
        missing = min(self._missing_seconds(now) + seconds, _DAY_SECONDS)
        return WriteBudget(self.bytes_per_day, now + missing)

    def _missing_seconds(self, now: float) -> float:
        # A clock that was wrong must not stop writes for longer than a day.
        return min(max(self.full_at - now, 0.0), _DAY_SECONDS)
