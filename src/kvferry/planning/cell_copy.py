"""Cell copies: loops that move every cell of a block, and the offsets of the cells.

A block of 784 tokens is 49 cells of 16 tokens; a block of 400 is 25. The offset of a cell in its block
depends on one side alone. So a movement between the two is one list of loops for a single cell, and per side
the offsets of its 49 or 25 cells. Memory and time grow with the sum of both counts, not with their common
multiple.

Fields whose cells have equal offsets share a cell copy. K and V packed per token need one. A transposed K
with a V that is not transposed needs two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.planning.descriptors import Descriptors, Int64s
from kvferry.planning.strided_copy import StridedCopy, expand_copies, fuse_copies

Offsets = tuple[int, ...]
"""Byte offset of every cell of a block, from its lowest cell; none is negative."""

ONE_CELL: Offsets = (0,)
"""Offsets of a block that is one cell."""


@dataclass(frozen=True)
class CellCopy:
    """Strided copies that every cell of a block repeats.

    Attributes:
        src_at, dst_at: byte offset of each cell in its block, on either side.
        nests: strided copies of the cell at offset 0 on both sides.
    """

    src_at: Offsets
    dst_at: Offsets
    nests: tuple[StridedCopy, ...]

    @cached_property
    def descriptors(self) -> Descriptors:
        """Runs of the cell at offset 0, merged where they touch on both sides."""
        return expand_copies(self.nests)

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(bytes, number of runs) for each run length in `descriptors`."""
        found = np.unique(self.descriptors.length, return_counts=True)
        return tuple(zip(*(array.tolist() for array in found), strict=True))

    @cached_property
    def src_steps(self) -> frozenset[int]:
        """Distinct distances in bytes between neighbouring cells of a source block."""
        return frozenset(np.diff(self.src_offsets).tolist())

    @cached_property
    def dst_steps(self) -> frozenset[int]:
        """Distinct distances in bytes between neighbouring cells of a destination block."""
        return frozenset(np.diff(self.dst_offsets).tolist())

    @cached_property
    def src_offsets(self) -> Int64s:
        """`src_at` as int64 of shape (cells,)."""
        return np.array(self.src_at, np.int64)

    @cached_property
    def dst_offsets(self) -> Int64s:
        """`dst_at` as int64 of shape (cells,)."""
        return np.array(self.dst_at, np.int64)


@dataclass(frozen=True, slots=True)
class PoolCopies:
    """Strided copies between a pool's blocks and packed cells; `at` are the offsets of a block's cells."""

    at: Offsets
    nests: tuple[StridedCopy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PoolDescriptors:
    """Descriptors between a pool's blocks and packed cells; `at` are the offsets of a block's cells."""

    at: Offsets
    descriptors: Descriptors


def joined(parts: Iterable[CellCopy]) -> tuple[CellCopy, ...]:
    """Merge cell copies with equal offsets, and drop those without loops.

    >>> k, v = (CellCopy((0, 8), (0,), (StridedCopy(at, at, 4),)) for at in (0, 4))
    >>> joined([k, v, CellCopy((0, 3), (0,), ())])
    (CellCopy(src_at=(0, 8), dst_at=(0,), nests=(StridedCopy(src=0, dst=0, run=8, loops=()),)),)
    """
    found = defaultdict[tuple[Offsets, Offsets], list[StridedCopy]](list)
    for part in parts:
        if part.nests:
            found[part.src_at, part.dst_at] += part.nests
    return tuple(CellCopy(*at, fuse_copies(nests)) for at, nests in found.items())


def split_tokens(
    src: Int64s, dst: Int64s, cell_tokens: int
) -> Iterator[tuple[Offsets, Offsets, Int64s, Int64s]]:
    """Group the tokens of a cell by their offsets from cell to cell, on both sides.

    Usually there is one group. Cells that straddle kernel blocks differently have several.

    >>> src, dst = np.arange(6) * 2, np.arange(4) * 10
    >>> [(a, b, c.tolist(), d.tolist()) for a, b, c, d in split_tokens(src, dst, 2)]
    [((0, 4, 8), (0, 20), [0, 2], [0, 10])]

    Args:
        src, dst: byte offset of every token of a block on each side, int64; whole cells.
        cell_tokens: tokens of a cell.

    Yields:
        Offsets of the cells on both sides; offsets of the tokens in the cell at offset 0 on both sides.
    """
    cells = [side.reshape(-1, cell_tokens) for side in (src, dst)]
    steps = np.concatenate([side - side[0] for side in cells])
    kinds = np.zeros(cell_tokens, np.int64)
    if (steps != steps[:, :1]).any():
        _, kinds = np.unique(steps, axis=1, return_inverse=True)
    for kind in dict.fromkeys(kinds.reshape(-1).tolist()):
        tokens = np.flatnonzero(kinds == kind)
        at, first = [], []
        for side in cells:
            step = side[:, tokens[0]] - side[0, tokens[0]]
            # Offsets begin at the cell that lies lowest, which is the first but where tokens descend.
            at.append(tuple((step - step.min()).tolist()))
            first.append(side[0, tokens] + step.min())
        yield at[0], at[1], first[0], first[1]
