"""When chunks return, learned from those that were used: the chance of a use per byte and time.

Time is counted in requests. Chunks have *classes* by their history, and ages by the time since their last
use. For each class and age, `ReturnTimes` sums the bytes that were used again at that age, and the bytes that
were observed at that age, used or not, times the requests for which they were. The ratio is the hazard rate:
the share of bytes that is used with the next request.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Ages are divided at powers of two.
_AGES = 24
_STARTS = np.maximum(2.0 ** np.arange(_AGES), 1.0)

# Nothing is known of a class at first. Then the hazard rate is 1 / (_PRIOR_AGES * age), which makes the
# policy LRU, as if one chunk had returned at each age.
_PRIOR_AGES = 4.0
# Chunks for which the returns of all classes with the same uses count in each of these classes.
_SHARED_RETURNS = 8.0


def age_numbers(ages: Ints) -> Ints:
    """Return the index of the range of each age, int64: 0 for 0 and 1, 1 for 2 and 3, 2 for 4 to 7.

    >>> age_numbers(np.array([0, 1, 2, 3, 4, 1000])).tolist()
    [0, 0, 1, 1, 2, 9]
    """
    # The exponent of a power of two is exact.
    found: Ints = np.minimum(np.frexp(np.maximum(ages, 1))[1] - 1, _AGES - 1).astype(np.int64)
    return found


class ReturnTimes:
    """Sums over the chunks of each class, and the hit density of each class and age.

    Args:
        uses, turns: number of classes. The class of a chunk is ``use * turns + turn``. Classes with the same
            `use` are similar, so each learns from the others.
    """

    def __init__(self, uses: int, turns: int) -> None:
        self._shape = uses, turns, _AGES
        self._returned = np.zeros(uses * turns * _AGES)
        self._observed = np.zeros(uses * turns * _AGES)

    def add_returned(self, classes: Ints, ages: Ints, sizes: Ints | Floats) -> None:
        """Add bytes that were used at these ages: arrays of shape (chunks,)."""
        self._returned += self._sums(classes, ages, sizes)

    def add_observed(self, classes: Ints, ages: Ints, sizes: Ints | Floats) -> None:
        """Add bytes times the number of requests for which they were observed."""
        self._observed += self._sums(classes, ages, sizes)

    def forget(self, share: float) -> None:
        """Reduce the weight of everything so far by a share."""
        self._returned *= 1 - share
        self._observed *= 1 - share

    def densities(self, chunk_bytes: float) -> Floats:
        """Return the hit density of each class and age, float64 of shape (classes, ages).

        It is the largest share of the bytes that return per request, over all times for which they may be
        kept from that age on.

        Args:
            chunk_bytes: mean bytes of a chunk.
        """
        # Source: J. C. Gittins, "Bandit processes and dynamic allocation indices", Journal of the Royal
        # Statistical Society B 41(2), 1979. With a fixed price for a byte and request, it is best to keep a
        # chunk as long as this index is above the price.
        of_turn, at_turn = (sums.reshape(self._shape) for sums in (self._returned, self._observed))
        of_use = of_turn.sum(1) + chunk_bytes
        hazards = of_use / (at_turn.sum(1) + chunk_bytes * _PRIOR_AGES * _STARTS)
        shared = _SHARED_RETURNS * chunk_bytes
        returned = (of_turn + shared).reshape(-1, _AGES)
        observed = (at_turn + (shared / hazards)[:, None]).reshape(-1, _AGES)
        # Sums from age `first` up to age `last`, at [class, first, last].
        kept = [np.cumsum(sums, axis=1) for sums in (returned, observed)]
        gained, spent = (
            total[:, None, :] - total[:, :, None] + sums[:, :, None]
            for total, sums in zip(kept, (returned, observed), strict=True)
        )
        is_later = np.tri(_AGES, dtype=np.bool_).T
        found: Floats = (np.where(is_later, gained, 0.0) / np.where(is_later, spent, 1.0)).max(axis=2)
        return found

    def _sums(self, classes: Ints, ages: Ints, sizes: Ints | Floats) -> Floats:
        places = classes * _AGES + age_numbers(ages)
        found: Floats = np.bincount(places, sizes, minlength=len(self._returned)).astype(np.float64)
        return found
