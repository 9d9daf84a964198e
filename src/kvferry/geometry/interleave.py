"""Sequences that ranks divide by taking turns along them.

With context parallelism, ranks divide the tokens of each block in this way. A block then covers the tokens of
all these ranks, and each rank's page holds its own ones, in the order of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import GeometryError

_Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interleave:
    """The elements of a sequence that rank `rank` of `ranks` holds: each takes `size` elements in turn.

    >>> interleave = Interleave(1, 3, 2)
    >>> interleave.held(6).tolist()
    [2, 3, 8, 9, 14, 15]
    >>> interleave.index_of(interleave.held(6)).tolist()
    [0, 1, 2, 3, 4, 5]
    """

    rank: int = 0
    ranks: int = 1
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks or self.size < 1:
            raise GeometryError(
                f"rank {self.rank} of {self.ranks} takes {self.size} elements in turn; expected a rank below "
                "the number of ranks, and 1 element or more"
            )
        # What is alike must be one value, because planning compares values.
        if self.ranks == 1 and self.size != 1:
            raise GeometryError(f"a single rank takes {self.size} elements in turn; expected 1")

    @property
    def period(self) -> int:
        """Number of elements after which the first rank has its turn again."""
        return self.ranks * self.size

    def holds(self, at: _Int64s) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = at // self.size % self.ranks == self.rank
        return found

    def index_of(self, at: _Int64s) -> _Int64s:
        """Return the index among this rank's elements of elements that it holds, int64 of shape (n,)."""
        return at // self.period * self.size + at % self.size

    def held(self, count: int) -> _Int64s:
        """Return the positions of this rank's first `count` elements, int64 of shape (count,)."""
        index = np.arange(count, dtype=np.int64)
        first = self.rank * self.size
        return first + index // self.size * self.period + index % self.size

    def meets(self, other: Interleave) -> bool:
        """Return True if there is an element that both ranks hold, in a sequence of any length.

        >>> Interleave(0, 2, 1).meets(Interleave(1, 2, 1)), Interleave(0, 2, 1).meets(Interleave(1, 2, 4))
        (False, True)
        """
        # Turns of both ranks begin at every distance that is `apart` modulo the divisor of their periods.
        common = gcd(self.period, other.period)
        apart = (self.rank * self.size - other.rank * other.size) % common
        return apart < other.size or common - apart < self.size


NOT_INTERLEAVED = Interleave()
