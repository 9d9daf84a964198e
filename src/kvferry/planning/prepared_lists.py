"""Descriptors of one request as indices into lists that were prepared before any request.

A list has one descriptor for every row (run of a cell) of a route, every cell of a block, and every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.planning.descriptors import Int64s
from kvferry.planning.select import Cells
from kvferry.planning.template import Route

Int32s: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]


class DescriptorIndices(NamedTuple):
    """The descriptors of a read, as indices into the lists prepared for both sides: int32 of shape (n,)."""

    src: Int32s
    dst: Int32s


def join_indices(parts: Sequence[DescriptorIndices]) -> DescriptorIndices:
    """Concatenate the descriptors of several routes. There is at least one."""
    if len(parts) == 1:
        return parts[0]
    return DescriptorIndices(*map(np.concatenate, zip(*parts, strict=True)))


class TransferCounts(NamedTuple):
    """The size of one request's transfer over one route.

    Gaps that are read and discarded do not count. `pages` are contiguous runs of cells, often pages. Merged
    over consecutive cells they are `descriptors`, the longest of `largest_run` bytes.
    """

    bytes: int
    pages: int
    descriptors: int
    largest_run: int


@dataclass(frozen=True, slots=True)
class PreparedEntries:
    """The entries of one transfer method in the prepared descriptor list of one side."""

    base: int  # index of the first entry; the others follow it
    blocks: int  # in the pool, or images that fit into the staging area
    cells: int = 1  # per block; 1 for images

    def of(self, rows: int, ids: Int64s | Int32s, number: Int64s) -> Int32s:
        """Return the indices ``base + (row * cells + number % cells) * blocks + id``, int32 of (rows · n,).

        >>> PreparedEntries(100, 10, 3).of(2, np.array([4, 4, 5]), np.array([1, 2, 3])).tolist()
        [114, 124, 105, 144, 154, 135]

        `ids` are of blocks or images, `number` as in `Cells`, of each of n cells.
        """
        each = ids if self.cells == 1 else number % self.cells * self.blocks + ids
        each = each.astype(np.int32, copy=False)
        if rows == 1:
            return each + self.base
        # Row-major, first row 0 of all cells: neighbours in this order are often neighbours in memory too.
        step = self.cells * self.blocks
        row = np.arange(self.base, self.base + rows * step, step, dtype=np.int32)
        found: Int32s = (row[:, None] + each).reshape(-1)
        return found


def count_transfer(route: Route, cells: Cells) -> TransferCounts:
    """Return the bytes and descriptors of a request over one route, without listing descriptors."""
    count = len(cells)
    if not count:
        return TransferCounts(0, 0, 0, 0)
    pages = descriptors = route.runs_per_cell * count
    largest = route.longest_run
    for length, number, offsets in route.mergeable_runs:
        merged, longest = _merge_runs(route, cells, length, offsets)
        descriptors -= number * merged
        largest = max(largest, length * longest)
    return TransferCounts(route.cell_bytes * count, pages, descriptors, largest)


def _merge_runs(route: Route, cells: Cells, length: int, offsets: tuple[Int64s, Int64s]) -> tuple[int, int]:
    """Return how many cells have a run that continues that of the cell before, and the most in a row.

    Such runs have a `length` in bytes, and `offsets` as in `Route.mergeable_runs`.
    """
    src, dst = cells.src_number, cells.dst_number
    touch = _touches(cells.src_block, src, route.src_cells, route.src_stride, offsets[0], length)
    touch &= _touches(cells.dst_block, dst, route.dst_cells, route.dst_stride, offsets[1], length)
    merged = int(np.count_nonzero(touch))
    if merged in (0, len(touch)):
        return merged, merged + 1
    ends = np.concatenate([[-1], np.flatnonzero(~touch), [len(touch)]])
    return merged, int((ends[1:] - ends[:-1]).max())


def _touches(blocks: Int64s, number: Int64s, cells: int, stride: int, offsets: Int64s, length: int) -> Bools:
    """Return whether the run of each cell ends on one side where that of the next cell begins."""
    if cells == 1:  # a run that may touch that of the next block is as long as the stride
        at, length = blocks, 1
    else:
        at = blocks * stride + offsets[number % cells]
    found: Bools = at[1:] - at[:-1] == length
    return found
