"""Digest images: the packed cells of a route, by which both sides digest what one of them holds.

Each side has its own layout, block size and share of heads, so a digest of memory as it lies differs. A route
pairs the elements of both sides. A digest image gives each pair a place, in the order of the route's copies,
whatever method moves the bytes. Each side knows the places of its own elements by one half of the route. The
digest (`memory.image_digest`) depends on bytes and places only, so no image is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.packed_image import ALIGNMENT
from kvferry.planning.strided_copy import Loop, StridedCopy, coalesce_copy
from kvferry.planning.template import Route


@dataclass(frozen=True, slots=True)
class DigestImage:
    """The layout of a packed cell of a route, and the copies into it from the blocks of each side.

    Each copy fills its part of the image without gaps.
    """

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
        # Tensor views allow no negative strides.
        for copy in (part for one in cell_copy.copies for part in one.ascending()):
            here, there = _packed(copy, size)
            sides[0].append(there)
            sides[1].append(here)
            size += copy.bytes
        src.append(PoolCopies(cell_copy.src_offsets, tuple(sides[0])))
        dst.append(PoolCopies(cell_copy.dst_offsets, tuple(sides[1])))
    return DigestImage(-(-size // ALIGNMENT) * ALIGNMENT, tuple(src), tuple(dst))


def _packed(copy: StridedCopy, first: int) -> tuple[StridedCopy, StridedCopy]:
    """Return two copies into the image at byte `first`, from the destination and from the source."""
    step, here, there = copy.bytes, list[Loop](), list[Loop]()
    for loop in copy.loops:
        step //= loop.count
        here.append(Loop(loop.count, loop.dst, step))
        there.append(Loop(loop.count, loop.src, step))
    return (
        coalesce_copy(StridedCopy(copy.dst, first, copy.run, tuple(here))),
        coalesce_copy(StridedCopy(copy.src, first, copy.run, tuple(there))),
    )
