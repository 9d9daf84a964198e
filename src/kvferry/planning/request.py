"""The descriptors of one request: template and block tables, by array arithmetic alone.

A transport prepares the rows of a route once per block, so that descriptor ``base + row·blocks + block``
exists before any request does; a request is then two arrays of indices. `as_indices` gives those;
`as_addresses` gives the same descriptors spelled out, for a mover that has no prepared lists and for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.planning.pieces import Pieces
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


def as_indices(route: Route, cells: Cells, src_base: int, dst_base: int) -> Indices:
    """Indices into prepared lists that hold, from `src_base` and `dst_base`, every row for every block.

    Row-major: consecutive blocks of one row are neighbours, which is how memory lies when pages of a layer
    do. Phases follow one another.
    """
    src, dst = [], []
    first = 0
    for phase, rows in enumerate(route.phases):
        row = np.arange(first, first + len(rows), dtype=np.int32)[:, None]
        first += len(rows)
        of_phase = slice(None) if len(route.phases) == 1 else cells.phase == phase
        src_block = cells.src_block[of_phase].astype(np.int32)
        dst_block = cells.dst_block[of_phase].astype(np.int32)
        src.append((row * np.int32(route.src_blocks) + (src_block + np.int32(src_base))).reshape(-1))
        dst.append((row * np.int32(route.dst_blocks) + (dst_block + np.int32(dst_base))).reshape(-1))
    if len(src) == 1:
        return Indices(src[0], dst[0])
    return Indices(np.concatenate(src), np.concatenate(dst))


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
