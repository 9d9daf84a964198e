"""Cell copies: the strided copies of one cell, and the offsets of all cells in a block.

Blocks of 784 and of 400 tokens, for example, have 49 and 25 cells of 16 tokens. The offset of a cell in its
block depends on one side only. So this copy is described by the strided copies of a single cell, the offsets
of 49 source cells, and those of 25 destination cells. Memory and time grow with the sum of both numbers, not
with their product.

Fields whose cells have equal offsets share a cell copy. If K and V are packed per token, one is enough. If K
is transposed and V is not, two are needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.planning.descriptors import Descriptors, Int64s
from kvferry.planning.strided_copy import StridedCopy, expand_copies, fuse_copies

# Byte offset of every cell of a block, relative to the cell with the lowest address. All are at least 0.
Offsets = tuple[int, ...]

# Offsets for a block that consists of one cell.
ONE_CELL: Offsets = (0,)


@dataclass(frozen=True)
class CellCopy:
    """Strided copies of one cell of a block, and the offsets at which they are repeated for the other cells.

    Attributes:
        src_offsets, dst_offsets: byte offset of each cell of a block on each side, relative to the cell with
            the lowest address. The two blocks may have different numbers of cells.
        copies: strided copies of the cell with offset 0 on both sides.
    """

    src_offsets: Offsets
    dst_offsets: Offsets
    copies: tuple[StridedCopy, ...]

    @cached_property
    def descriptors(self) -> Descriptors:
        """Runs of the cell with offset 0. Runs that are contiguous on both sides are merged."""
        return expand_copies(self.copies)

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Distinct (length in bytes, number of runs of this length) of the runs of one cell."""
        found = np.unique(self.descriptors.length, return_counts=True)
        return tuple(zip(*(array.tolist() for array in found), strict=True))

    @cached_property
    def src_steps(self) -> frozenset[int]:
        """Distinct distances in bytes between neighbouring cells of a source block."""
        return frozenset(np.diff(self.src_offset_array).tolist())

    @cached_property
    def dst_steps(self) -> frozenset[int]:
        return frozenset(np.diff(self.dst_offset_array).tolist())

    @cached_property
    def src_offset_array(self) -> Int64s:
        return np.array(self.src_offsets, np.int64)

    @cached_property
    def dst_offset_array(self) -> Int64s:
        return np.array(self.dst_offsets, np.int64)


@dataclass(frozen=True, slots=True)
class PoolCopies:
    """Strided copies of one cell between the blocks of a pool and packed memory.

    Attributes:
        at: byte offset of each cell in its block.
        nests: strided copies of the cell with offset 0.
    """

    at: Offsets
    # Messages between engines contain this name (`transport.gather_messages`), so it must not change.
    nests: tuple[StridedCopy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PoolDescriptors:
    """Descriptors of one cell between the blocks of a pool and packed memory.

    Attributes:
        at: byte offset of each cell in its block.
        descriptors: runs of the cell with offset 0.
    """

    at: Offsets
    descriptors: Descriptors


def merge_cell_copies(parts: Iterable[CellCopy]) -> tuple[CellCopy, ...]:
    """Merge all `CellCopy` objects with equal offsets on both sides, and leave out those that copy nothing.

    >>> k, v = (CellCopy((0, 8), (0,), (StridedCopy(at, at, 4),)) for at in (0, 4))
    >>> merge_cell_copies([k, v, CellCopy((0, 3), (0,), ())])
    (CellCopy(src_offsets=(0, 8), dst_offsets=(0,), copies=(StridedCopy(src=0, dst=0, run=8, loops=()),)),)
    """
    found = defaultdict[tuple[Offsets, Offsets], list[StridedCopy]](list)
    for part in parts:
        if part.copies:
            found[part.src_offsets, part.dst_offsets] += part.copies
    return tuple(CellCopy(*at, fuse_copies(copies)) for at, copies in found.items())


def split_tokens(
    src: Int64s, dst: Int64s, cell_tokens: int
) -> Iterator[tuple[Offsets, Offsets, Int64s, Int64s]]:
    """Split the tokens of a cell into groups, so that one `CellCopy` can describe each group.

    Args:
        src, dst: byte offset of every token of a block on each side, int64 of shape (tokens,). The number of
            tokens is a multiple of `cell_tokens`.

    Yields:
        (src_offsets, dst_offsets, src_tokens, dst_tokens). The first two are as in `CellCopy`. The other two
        are the byte offsets, in the block, of the group's tokens in the cell with offset 0, int64 of shape
        (tokens of the group,).
    """
    cells = [side.reshape(-1, cell_tokens) for side in (src, dst)]
    steps = np.concatenate([side - side[0] for side in cells])
    # Tokens share a `CellCopy` only if they have the same distances from cell to cell. All tokens of a cell
    # do, unless a block consists of kernel blocks that end inside cells.
    kinds = np.zeros(cell_tokens, np.int64)
    if (steps != steps[:, :1]).any():
        _, kinds = np.unique(steps, axis=1, return_inverse=True)
    for kind in dict.fromkeys(kinds.reshape(-1).tolist()):
        tokens = np.flatnonzero(kinds == kind)
        at, first = [], []
        for side in cells:
            step = side[:, tokens[0]] - side[0, tokens[0]]
            # Offsets are relative to the lowest cell, which is the first one unless addresses descend.
            at.append(tuple((step - step.min()).tolist()))
            first.append(side[0, tokens] + step.min())
        yield at[0], at[1], first[0], first[1]
