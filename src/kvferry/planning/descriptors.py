"""Arrays of transfer descriptors. A descriptor is a run of bytes that is contiguous on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Byte offsets or addresses on each side, and lengths in bytes, of n runs: int64 of shape (n,)."""

    src: Int64s
    dst: Int64s
    length: Int64s

    def __len__(self) -> int:
        return len(self.src)

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())


def join(parts: Sequence[Descriptors]) -> Descriptors:
    """Concatenate descriptors, sort them by destination, and merge runs that are contiguous on both sides."""
    whole = concatenate(parts)
    order = np.argsort(whole.dst, kind="stable")
    return merge(whole.src[order], whole.dst[order], whole.length[order])


def concatenate(parts: Sequence[Descriptors]) -> Descriptors:
    """Concatenate descriptors in the given order, without merging adjacent runs."""
    # `np.concatenate` refuses an empty list, and without this array it would not know the dtype.
    empty = np.zeros(0, np.int64)
    return Descriptors(
        np.concatenate([empty, *(p.src for p in parts)]),
        np.concatenate([empty, *(p.dst for p in parts)]),
        np.concatenate([empty, *(p.length for p in parts)]),
    )


def merge(src: Int64s, dst: Int64s, length: Int64s) -> Descriptors:
    """Merge each run of bytes into the previous run if it follows directly at source and destination.

    >>> merged = merge(np.array([0, 8, 16]), np.array([0, 8, 32]), np.array([8, 8, 8]))
    >>> merged.src.tolist(), merged.dst.tolist(), merged.length.tolist()
    ([0, 16], [0, 32], [16, 8])
    """
    if len(src) == 0:
        return Descriptors(src, dst, length)
    continues = (src[1:] == src[:-1] + length[:-1]) & (dst[1:] == dst[:-1] + length[:-1])
    first = np.concatenate([[0], np.flatnonzero(~continues) + 1])
    return Descriptors(src[first], dst[first], np.add.reduceat(length, first))
