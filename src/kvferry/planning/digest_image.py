"""Digest images: the order in which both sides of a route digest the bytes of a cell.

Each side has its own layout, block size and share of heads, so a digest of memory as it lies differs. A route
pairs the elements of both sides. A digest image packs them in the order of the route's copies, whatever
method moves them. Each side packs its own blocks by one half of the route, and digests the packed bytes.

The digest covers a cell as a series of *pieces*, and of each piece all cells before the next piece. A piece
is small enough for the CPU's cache, unless it consists of long runs, which can be digested where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.packed_image import ALIGNMENT
from kvferry.planning.strided_copy import Loop, StridedCopy, coalesce_copy
from kvferry.planning.template import Route

# Largest piece in bytes that is packed before it is digested.
PIECE_BYTES = 128 << 10

# Length in bytes from which a run is digested where it lies. python-xxhash then releases the interpreter's
# lock. For shorter runs it does not, and the engine's thread would wait, so they are packed.
LONG_RUN_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class DigestImage:
    """The layout of a packed cell of a route, and the copies that pack it from the blocks of each side."""

    stride: int  # bytes from one image to the next, a multiple of `ALIGNMENT`
    src: tuple[PoolCopies, ...]
    dst: tuple[PoolCopies, ...]


def digest_image(route: Route) -> DigestImage:
    """Return the image by which both sides of a route digest a cell.

    In this example, the source has two rows of 8 bytes far apart, and the destination has one of 16.

    >>> from kvferry.planning.cell_copy import ONE_CELL, CellCopy
    >>> copies = (StridedCopy(1000, 0, 8, (Loop(2, 500, 8),)),)
    >>> route = Route(
    ...     src_group=0, dst_group=0, layers=("layers.0",), cell_tokens=1, src_cells=1, dst_cells=1,
    ...     src_stride=2000, dst_stride=16, src_blocks=4, dst_blocks=4,
    ...     cell_copies=(CellCopy(ONE_CELL, ONE_CELL, copies),),
    ... )
    >>> image = digest_image(route)
    >>> image.src[0].nests
    (StridedCopy(src=1000, dst=0, run=8, loops=(Loop(count=2, src=500, dst=8),)),)
    >>> image.dst[0].nests
    (StridedCopy(src=0, dst=0, run=16, loops=()),)
    """
    src, dst, size = list[PoolCopies](), list[PoolCopies](), 0
    for cell_copy in route.cell_copies:
        sides: tuple[list[StridedCopy], list[StridedCopy]] = ([], [])
        for piece in (part for copy in cell_copy.copies for part in _pieces(copy)):
            here, there = _packed(piece, size)
            sides[0].append(there)
            sides[1].append(here)
            size += piece.bytes
        src.append(PoolCopies(cell_copy.src_offsets, tuple(sides[0])))
        dst.append(PoolCopies(cell_copy.dst_offsets, tuple(sides[1])))
    return DigestImage(-(-size // ALIGNMENT) * ALIGNMENT, tuple(src), tuple(dst))


def _pieces(copy: StridedCopy) -> Iterator[StridedCopy]:
    """Split a copy into pieces without negative strides."""
    for part in copy.ascending():
        yield from _split(part)


def _split(copy: StridedCopy) -> Iterator[StridedCopy]:
    if copy.bytes <= PIECE_BYTES or copy.run >= LONG_RUN_BYTES or not copy.loops:
        yield copy
        return
    outer, inner = copy.loops[0], replace(copy, loops=copy.loops[1:])
    count = max(1, PIECE_BYTES // inner.bytes)
    for first in range(0, outer.count, count):
        part = inner.at(first * outer.src, first * outer.dst)
        if (left := min(count, outer.count - first)) > 1:
            part = replace(part, loops=(replace(outer, count=left), *inner.loops))
        yield from _split(part)


def _packed(piece: StridedCopy, first: int) -> tuple[StridedCopy, StridedCopy]:
    """Return the copies of a piece from the destination and from the source to the image, from `first` on."""
    step, here, there = piece.bytes, list[Loop](), list[Loop]()
    for loop in piece.loops:
        step //= loop.count
        here.append(Loop(loop.count, loop.dst, step))
        there.append(Loop(loop.count, loop.src, step))
    return (
        coalesce_copy(StridedCopy(piece.dst, first, piece.run, tuple(here))),
        coalesce_copy(StridedCopy(piece.src, first, piece.run, tuple(there))),
    )
