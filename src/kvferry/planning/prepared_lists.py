"""Descriptors of one request as indices into prepared descriptor lists.

Before any request, a transport prepares one descriptor for every row (run of a cell) of a route, every cell
of a block, and every block. The index of a descriptor in the prepared list is
``base + (row·cells + cell)·blocks + block`` (`PreparedEntries`). A request is then one array of indices per
side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.planning.cell_copy import CellCopy
from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells
from kvferry.planning.template import Route

Int32s: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class DescriptorIndices:
    """Pairs of indices into the prepared descriptor lists of both sides.

    Attributes:
        src, dst: index of each descriptor in the list of either side, int32 of shape (n,). The base of the
            route is already added.
    """

    src: Int32s
    dst: Int32s


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """Totals of a request over one route.

    Attributes:
        bytes: number of useful bytes.
        pages: number of prepared descriptors.
        descriptors: number of descriptors after runs of consecutive cells are merged if they are adjacent on
            both sides.
        largest_run: bytes of the longest merged descriptor.
    """

    bytes: int
    pages: int
    descriptors: int
    largest_run: int


@dataclass(frozen=True, slots=True)
class PreparedEntries:
    """The entries of one transfer method in the prepared descriptor list of one side.

    In the list of a staging area, packed cells (*images*) take the place of blocks.

    Attributes:
        base: index of the first entry.
        blocks: number of blocks in the pool, or of images that fit into the staging area.
        cells: number of cells per block; 1 for images.
    """

    base: int
    blocks: int
    cells: int = 1

    def of(self, rows: int, ids: Int64s | Int32s, number: Int64s) -> Int32s:
        """Return the indices of the descriptors of `n` cells, int32 of shape (rows · n,).

        The order is row-major: first all cells of row 0, then all cells of row 1. So consecutive blocks of a
        row are neighbours, as the pages of a layer are in memory.

        >>> PreparedEntries(100, 10, 3).of(2, np.array([4, 4, 5]), np.array([1, 2, 3])).tolist()
        [114, 124, 105, 144, 154, 135]

        Args:
            rows: number of rows (runs) per cell.
            ids: block id or image number of every cell, of shape (n,).
            number: index of every cell in the sequence, of shape (n,).
        """
        each = ids if self.cells == 1 else number % self.cells * self.blocks + ids
        each = each.astype(np.int32, copy=False)
        if rows == 1:
            return each + np.int32(self.base)
        step = self.cells * self.blocks
        row = np.arange(self.base, self.base + rows * step, step, dtype=np.int32)
        found: Int32s = np.add.outer(row, each).reshape(-1)
        return found


def count_transfer(route: Route, cells: Cells) -> TransferCounts:
    """Return the totals of a request over one route. They are computed without listing the descriptors.

    Args:
        route: route to transfer.
        cells: cells of the route that the request transfers.
    """
    total = pages = descriptors = largest = 0
    n = len(cells)
    for cell_copy in route.cell_copies if n else ():
        for length, rows in cell_copy.lengths:
            longest, breaks = 1, n - 1
            if _may_touch(route, cell_copy, length):
                longest, breaks = _touching(*_positions(route, cell_copy, cells), length)
            total += length * rows * n
            pages += rows * n
            descriptors += rows * (breaks + 1)
            largest = max(largest, length * longest)
    return TransferCounts(total, pages, descriptors, largest)


def _positions(route: Route, cell_copy: CellCopy, cells: Cells) -> tuple[Int64s, Int64s]:
    """Return the byte offset of each cell on both sides, relative to the lowest cell of block 0.

    Returns:
        (offsets at the source, offsets at the destination), int64 of shape (n,).
    """
    src, dst = cells.src_block * route.src_stride, cells.dst_block * route.dst_stride
    if route.src_cells > 1:
        src += cell_copy.src_offsets[cells.number % route.src_cells]
    if route.dst_cells > 1:
        dst += cell_copy.dst_offsets[cells.number % route.dst_cells]
    return src, dst


def _may_touch(route: Route, cell_copy: CellCopy, length: int) -> bool:
    """Return True if runs of `length` bytes in consecutive cells can be adjacent on both sides.

    The block tables then decide which runs are adjacent.

    Args:
        route: route to transfer.
        cell_copy: cell copy of the route that contains the runs.
        length: length of a run in bytes.
    """
    src_next, dst_next = route.src_stride + cell_copy.src_at[0], route.dst_stride + cell_copy.dst_at[0]
    src = length in cell_copy.src_steps or length == src_next - cell_copy.src_at[-1]
    return src and (length in cell_copy.dst_steps or length == dst_next - cell_copy.dst_at[-1])


def _touching(src: Int64s, dst: Int64s, length: int) -> tuple[int, int]:
    """Return the largest number of consecutive cells whose runs are adjacent on both sides.

    Also return the number of *breaks*: pairs of consecutive cells whose runs are not adjacent.

    Args:
        src, dst: byte offset of the run of each cell on both sides, int64 of shape (n,).
        length: length of a run in bytes.
    """
    breaks = np.flatnonzero((np.diff(src) != length) | (np.diff(dst) != length)) + 1
    return int(np.diff(np.concatenate([[0], breaks, [len(src)]])).max()), len(breaks)
