"""Cell copies: the strided copies of one cell, and the offsets of all cells in a block.

A *cell* is the part of a block that is copied as one unit; its number of tokens divides both block sizes. For
example, blocks of 784 and of 400 tokens have 49 and 25 cells of 16 tokens. The offset of a cell in its block
depends on one side only. So a copy between these blocks is described by the strided copies of a single cell,
the offsets of 49 source cells, and the offsets of 25 destination cells. Memory and time grow with the sum of
both numbers, not with their product.

Fields whose cells have equal offsets share a cell copy. If K and V are packed per token, one cell copy is
enough. If K is transposed and V is not, two are needed.
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
"""Byte offset of every cell of a block, relative to the cell with the lowest address. All are at least 0."""

ONE_CELL: Offsets = (0,)
"""Offsets for a block that consists of one cell."""


@dataclass(frozen=True)
class CellCopy:
    """Strided copies of one cell of a block, and the offsets at which they are repeated for the other cells.

    A cell is the part of a block that is copied as one unit. All cells of a block are copied in the same way.
    To copy a cell, add its offsets to the addresses in `copies`.

    Attributes:
        src_offsets, dst_offsets: byte offset of each cell of a source block, and of each cell of a
            destination block. Offsets are relative to the cell with the lowest address in the block. The two
            blocks may have different numbers of cells.
        copies: strided copies (nested loops over runs of bytes) of the cell with offset 0 on both sides.
    """

    src_offsets: Offsets
    dst_offsets: Offsets
    copies: tuple[StridedCopy, ...]

    @cached_property
    def descriptors(self) -> Descriptors:
        """Descriptors of the runs (contiguous bytes) of the cell whose offset in its block is 0.

        Runs that are contiguous in both the source and the destination are merged into one.
        """
        return expand_copies(self.copies)

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Distinct lengths of the contiguous runs of one cell (part of a block that is copied as one unit).

        Each entry is (length in bytes, number of runs of this length).
        """
        found = np.unique(self.descriptors.length, return_counts=True)
        return tuple(zip(*(array.tolist() for array in found), strict=True))

    @cached_property
    def src_steps(self) -> frozenset[int]:
        """Distinct distances in bytes between neighbouring cells (copied units) of a source block."""
        return frozenset(np.diff(self.src_offset_array).tolist())

    @cached_property
    def dst_steps(self) -> frozenset[int]:
        """Distinct distances in bytes between neighbouring cells (copied units) of a destination block."""
        return frozenset(np.diff(self.dst_offset_array).tolist())

    @cached_property
    def src_offset_array(self) -> Int64s:
        """Byte offset of each cell (copied unit) in its source block, int64 of shape (cells,)."""
        return np.array(self.src_offsets, np.int64)

    @cached_property
    def dst_offset_array(self) -> Int64s:
        """Byte offset of each cell (copied unit) in its destination block, int64 of shape (cells,)."""
        return np.array(self.dst_offsets, np.int64)


@dataclass(frozen=True, slots=True)
class PoolCopies:
    """Strided copies between the blocks of a pool and packed memory, for one cell of a block.

    A cell is the part of a block that is copied as one unit. All cells of a block are copied in the same way.
    To copy a cell, add its offset to the addresses in `nests`.

    Attributes:
        at: byte offset of each cell in its block.
        nests: strided copies (nested loops over runs of bytes) of the cell with offset 0. Messages between
            engines contain the name of this attribute (`transport.gather_messages`), so it must not change.
    """

    at: Offsets
    nests: tuple[StridedCopy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PoolDescriptors:
    """Transfer descriptors between the blocks of a pool and packed memory, for one cell of a block.

    A cell is the part of a block that is copied as one unit. All cells of a block are copied in the same way.
    To copy a cell, add its offset to the addresses in `descriptors`.

    Attributes:
        at: byte offset of each cell in its block.
        descriptors: source, destination and length of each run of the cell with offset 0.
    """

    at: Offsets
    descriptors: Descriptors


def merge_cell_copies(parts: Iterable[CellCopy]) -> tuple[CellCopy, ...]:
    """Merge all `CellCopy` objects that have equal `src_offsets` and equal `dst_offsets`.

    Objects without strided copies are left out.

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

    A cell is a fixed number of consecutive tokens of a block. Tokens can share a `CellCopy` only if they have
    the same byte distances from cell to cell. Usually all tokens of a cell do, and form one group. There are
    several groups if a block consists of kernel blocks that end inside cells.

    Args:
        src, dst: byte offset of every token of a block on each side, int64 of shape (tokens,). The number of
            tokens is a multiple of `cell_tokens`.
        cell_tokens: number of tokens per cell.

    Yields:
        (src_offsets, dst_offsets, src_tokens, dst_tokens) for each group. The first two are the byte offsets
        of the cells, as in `CellCopy`. The other two are the byte offsets, in the block, of the group's
        tokens in the cell with offset 0, int64 of shape (tokens of the group,).
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
            # Offsets are relative to the lowest cell, which is the first one unless addresses descend.
            at.append(tuple((step - step.min()).tolist()))
            first.append(side[0, tokens] + step.min())
        yield at[0], at[1], first[0], first[1]
