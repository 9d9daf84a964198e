"""The descriptors of one request: template and block tables, by array arithmetic alone.

A transport prepares the rows of a route once per block, so that descriptor ``base + row·blocks + block``
exists before any request does; a request is then two arrays of indices. `as_indices` gives those;
`as_addresses` gives the same descriptors spelled out, for a mover that has no prepared lists and for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.planning.pieces import Int64s, Pieces
from kvferry.planning.select import Cells
from kvferry.planning.template import Route

Int32s: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Indices:
    """Positions in the prepared lists of both sides, paired.

    Attributes:
        src, dst: int32 of shape (n,), offset by the route's base in each list.
    """

    src: Int32s
    dst: Int32s


@dataclass(frozen=True, slots=True)
class Tally:
    """What a request moves over one route.

    Attributes:
        bytes: useful bytes.
        pages: prepared descriptors used.
        descriptors: what is left when neighbours of one phase that touch on both sides are one.
        largest_run: bytes of the largest of those.
    """

    bytes: int
    pages: int
    descriptors: int
    largest_run: int


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """One side of some cells: where its entries are in a prepared list.

    A list holds, from `base` on, every row of every phase, and of each row an entry per block or image.

    Attributes:
        ids: block or image of every cell, int64 or int32 of shape (n,).
        count: entries per row, at least 1.
        base: where the list begins.
    """

    ids: Int64s | Int32s
    count: int
    base: int


def paired(rows: Sequence[int], phase: Int64s, src: Ends, dst: Ends) -> Indices:
    """Entries of both sides for every row of every cell.

    Row-major: consecutive blocks of one row are neighbours, which is how memory lies when pages of a layer
    do. Phases follow one another.

    Args:
        rows: rows of a cell, by phase; one number for all phases if they are alike.
        phase: of every cell, int64 of shape (n,).
        src, dst: of the same cells.
    """
    if len(rows) == 1:
        return Indices(_entries(0, rows[0], src, slice(None)), _entries(0, rows[0], dst, slice(None)))
    found_src, found_dst = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    first = 0
    for number, count in enumerate(rows):
        of_phase = phase == number
        found_src.append(_entries(first, count, src, of_phase))
        found_dst.append(_entries(first, count, dst, of_phase))
        first += count
    return Indices(np.concatenate(found_src), np.concatenate(found_dst))


def _entries(first: int, rows: int, ends: Ends, part: slice | npt.NDArray[np.bool_]) -> Int32s:
    """Entries of so many rows from `first` on, of the cells in `part`."""
    begin, ids = ends.base + first * ends.count, ends.ids[part].astype(np.int32, copy=False)
    if rows == 1:
        return ids + np.int32(begin)
    row = np.arange(begin, begin + rows * ends.count, ends.count, dtype=np.int32)
    found: Int32s = np.add.outer(row, ids).reshape(-1)
    return found


def as_indices(route: Route, cells: Cells, src_base: int, dst_base: int) -> Indices:
    """Entries of lists that hold, from `src_base` and `dst_base` on, every row of a route for every block."""
    return paired(
        [len(rows) for rows in route.phases],
        cells.phase,
        Ends(cells.src_block, route.src_blocks, src_base),
        Ends(cells.dst_block, route.dst_blocks, dst_base),
    )


def as_addresses(route: Route, cells: Cells) -> Pieces:
    """The same descriptors, in the same order, as absolute addresses and lengths."""
    src, dst, length = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for phase, rows in enumerate(route.phases):
        of_phase = cells.phase == phase
        src_block, dst_block = cells.src_block[of_phase], cells.dst_block[of_phase]
        src.append((rows.src[:, None] + src_block * route.src_stride).reshape(-1))
        dst.append((rows.dst[:, None] + dst_block * route.dst_stride).reshape(-1))
        length.append(np.repeat(rows.length, len(src_block)))
    return Pieces(np.concatenate(src), np.concatenate(dst), np.concatenate(length))


def tally(route: Route, cells: Cells) -> Tally:
    """Count what a request moves over `route`, without spelling the descriptors out."""
    total = pages = descriptors = largest = 0
    for phase, rows in enumerate(route.phases):
        of_phase = slice(None) if len(route.phases) == 1 else cells.phase == phase
        src_block, dst_block = cells.src_block[of_phase], cells.dst_block[of_phase]
        n = len(src_block)
        if not n or not len(rows):
            continue
        joined = (rows.length == route.src_stride) & (rows.length == route.dst_stride)
        breaks = np.flatnonzero((np.diff(src_block) != 1) | (np.diff(dst_block) != 1)) + 1
        longest = int(np.diff(np.concatenate([[0], breaks, [n]])).max())
        total += rows.total_bytes * n
        pages += len(rows) * n
        descriptors += int(joined.sum()) * (len(breaks) + 1) + int((~joined).sum()) * n
        largest = max(largest, int((rows.length * np.where(joined, longest, 1)).max()))
    return Tally(total, pages, descriptors, largest)
