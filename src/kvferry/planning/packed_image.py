"""Packed cells: contiguous buffers for cells whose runs are too short to transfer one by one.

An *image* is one cell (part of a block that is copied as one unit), packed into contiguous memory. It can be
read with few large descriptors. There are two kinds of images:

- *Gathered* (`gather_image`): the image has the byte order of the destination. It contains only the bytes
  that this source supplies. The source copies them into the image. The destination then reads each run that
  is contiguous in its own memory with one descriptor, directly into place.
- *Fetched* (`fetch_image`): the image has the byte order of the source. Each read covers a contiguous range
  of the source. It includes gaps if reading a gap is cheaper than another descriptor. The destination then
  copies the bytes from the image into place.

`_pack` computes both kinds, for one side or the other. All cells of a route have the same image layout. The
offset of a cell in its block is stored separately (`planning.cell_copy`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from kvferry.planning.cell_copy import CellCopy, Offsets, PoolCopies, PoolDescriptors
from kvferry.planning.descriptors import Descriptors, Int64s
from kvferry.planning.strided_copy import Loop, StridedCopy

Side: TypeAlias = Literal["src", "dst"]

ALIGNMENT = 64
"""Alignment of images in bytes, so that copies work on whole words."""

MAX_READS = 1 << 16
"""Maximum number of reads per image. Cells that need more reads are not packed."""


@dataclass(frozen=True, slots=True)
class PackedImage:
    """The layout of images: contiguous buffers that each hold one packed cell.

    A cell is the part of a block that is copied as one unit. There are two kinds of images. A gathered image
    is packed by the source, and the destination reads from the image. A fetched image is filled by reads from
    the source, and the destination copies from the image.

    Attributes:
        stride: distance in bytes between the starts of consecutive images, a multiple of `ALIGNMENT`.
        pool_copies: strided copies between the engine's blocks and the image: from the source to a gathered
            image, or from a fetched image to the destination. The addresses on the engine's side are absolute
            addresses in block 0.
        reads: descriptors of the reads, in the order of the image: from a gathered image to the destination,
            or from the source to a fetched image.
    """

    stride: int
    pool_copies: tuple[PoolCopies, ...]
    reads: tuple[PoolDescriptors, ...]

    @property
    def bytes(self) -> int:
        """Total bytes of all reads of one image (packed cell)."""
        return sum(each.descriptors.total_bytes for each in self.reads)

    @property
    def longest(self) -> int:
        """Length in bytes of the longest read of an image (packed cell)."""
        return max(int(each.descriptors.length.max()) for each in self.reads)


def gather_image(cell_copies: Iterable[CellCopy]) -> PackedImage | None:
    """Return the layout of images that the source packs for the destination to read.

    An image is contiguous memory that holds one cell (part of a block), here in the byte order of the
    destination. Return None if nothing is copied or an image would need more than `MAX_READS` reads.

    Args:
        cell_copies: copies of one cell from the source to the destination.

    Example: the source has one buffer per layer, and the destination stores all layers of one head together.

    >>> from kvferry.planning.cell_copy import ONE_CELL
    >>> copies = tuple(StridedCopy(layer * 1000, layer * 8, 8, (Loop(2, 8, 24),)) for layer in range(3))
    >>> image = gather_image([CellCopy(ONE_CELL, ONE_CELL, copies)])
    >>> image.pool_copies[0].nests[1]
    StridedCopy(src=1000, dst=8, run=8, loops=(Loop(count=2, src=8, dst=24),))
    >>> reads = image.reads[0].descriptors
    >>> reads.src.tolist(), reads.dst.tolist(), reads.length.tolist()  # one read: 2 heads, 3 layers, 8 bytes
    ([0], [0], [48])
    """
    return _image(cell_copies, "dst", 0, ())


def fetch_image(
    cell_copies: Iterable[CellCopy], gap_bytes: int, region_starts: Sequence[int] = ()
) -> PackedImage | None:
    """Return the layout of images that the destination reads from the source and then unpacks.

    An image is contiguous memory that holds one cell (part of a block), here in the byte order of the source.
    Return None if nothing is copied or an image would need more than `MAX_READS` reads.

    Args:
        cell_copies: copies of one cell from the source to the destination.
        gap_bytes: length in bytes of the longest gap between two runs that is read instead of skipped.
        region_starts: first address of each registered region of the source. No read may cross these
            addresses.
    """
    return _image(cell_copies, "src", gap_bytes, region_starts)


def _image(
    cell_copies: Iterable[CellCopy], side: Side, gap_bytes: int, region_starts: Sequence[int]
) -> PackedImage | None:
    """Return the layout of images (packed cells) in the byte order of one side.

    Return None if nothing is copied or an image would need more than `MAX_READS` reads.

    Args:
        cell_copies: copies of one cell from the source to the destination.
        side: side whose byte order the image has, ``"src"`` or ``"dst"``.
        gap_bytes: length in bytes of the longest gap between two runs that is read instead of skipped.
        region_starts: addresses that no read may cross; empty if there are none.
    """
    by_offsets = defaultdict[Offsets, list[tuple[Offsets, tuple[StridedCopy, ...]]]](list)
    for cell_copy in cell_copies:
        at, other = (
            (cell_copy.src_offsets, cell_copy.dst_offsets)
            if side == "src"
            else (cell_copy.dst_offsets, cell_copy.src_offsets)
        )
        by_offsets[at].append((other, cell_copy.copies))
    copies = defaultdict[Offsets, list[StridedCopy]](list)
    reads = list[PoolDescriptors]()
    size = 0
    for at, group in by_offsets.items():
        parts = [
            (other, part) for other, cell_copy in group for copy in cell_copy for part in copy.ascending()
        ]
        packed = _pack([part for _, part in parts], side, gap_bytes, region_starts, size)
        if packed is None:
            return None
        placed, start, inside, length = packed
        descriptors = (
            Descriptors(start, inside, length) if side == "src" else Descriptors(inside, start, length)
        )
        reads.append(PoolDescriptors(at, descriptors))
        size += descriptors.total_bytes
        for (other, _), found in zip(parts, placed, strict=True):
            copies[other] += found
    if not size or sum(len(each.descriptors) for each in reads) > MAX_READS:
        return None
    stride = -(-size // ALIGNMENT) * ALIGNMENT
    return PackedImage(stride, tuple(PoolCopies(at, tuple(of)) for at, of in copies.items()), tuple(reads))


def _pack(
    copies: Sequence[StridedCopy], side: Side, gap_bytes: int, region_starts: Sequence[int], first: int
) -> tuple[list[list[StridedCopy]], Int64s, Int64s, Int64s] | None:
    """Replace the addresses of one side by offsets in an image (packed cell), and compute the image's reads.

    Args:
        copies: strided copies of a cell, from the source to the destination.
        side: side whose addresses are replaced, ``"src"`` or ``"dst"``.
        gap_bytes: length in bytes of the longest gap between two runs that is read instead of skipped.
        region_starts: addresses that no read may cross.
        first: offset in bytes at which these copies begin in the image.

    Returns:
        (copies, address, offset, length). `copies` lists, for each given copy, the copies that replace it.
        The other three are int64 of shape (reads,): for each read, the address in the memory of `side`, the
        byte offset in the image, and the length in bytes. The result is None if there are no copies or too
        many reads.
    """
    if not copies:
        return None
    side_runs = [_side_runs(copy, side) for copy in copies]
    if sum(int(np.prod([count for count, _ in outer])) for _, outer in side_runs) > MAX_READS:
        return None
    starts = [
        _starts(_address(copy, side), outer) for copy, (_, outer) in zip(copies, side_runs, strict=True)
    ]
    lengths = [
        np.full(len(start), length, np.int64) for start, (length, _) in zip(starts, side_runs, strict=True)
    ]
    at, length = _merge_ranges(np.concatenate(starts), np.concatenate(lengths), gap_bytes, region_starts)
    inside = first + np.concatenate([[0], np.cumsum(length)[:-1]])
    return [_map_to_image(copy, side, at, inside) for copy in copies], at, inside, length


def _address(copy: StridedCopy, side: Side) -> int:
    return copy.src if side == "src" else copy.dst


def _distance(loop: Loop, side: Side) -> int:
    return loop.src if side == "src" else loop.dst


def _side_runs(copy: StridedCopy, side: Side) -> tuple[int, list[tuple[int, int]]]:
    """Return the memory that a strided copy covers on one side, as loops over contiguous runs.

    A run is as long as possible on this side. It may be longer than the runs of the copy itself.

    Args:
        copy: strided copy (nested loops over runs).
        side: side whose addresses and strides are used, ``"src"`` or ``"dst"``.

    Returns:
        Length of a run in bytes, and (count, stride in bytes) of each loop over the runs, in ascending order
        of stride.
    """
    length, outer = copy.run, list[tuple[int, int]]()
    for loop in sorted(copy.loops, key=lambda loop: abs(_distance(loop, side))):
        if not outer and _distance(loop, side) == length:
            length *= loop.count
        else:
            outer.append((loop.count, _distance(loop, side)))
    return length, outer


def _starts(first: int, outer: Sequence[tuple[int, int]]) -> Int64s:
    out = np.array([first], np.int64)
    for count, distance in outer:
        out = (out[:, None] + np.arange(count, dtype=np.int64) * distance).reshape(-1)
    return out


def _merge_ranges(
    start: Int64s, length: Int64s, gap_bytes: int, region_starts: Sequence[int]
) -> tuple[Int64s, Int64s]:
    """Sort memory ranges by address, and merge ranges that touch, overlap or are at most `gap_bytes` apart.

    Args:
        start, length: address and length in bytes of each range, int64 of shape (n,).
        gap_bytes: length in bytes of the longest gap that a merged range may include.
        region_starts: addresses that no merged range may cross.

    Returns:
        (address, length in bytes) of the merged ranges, each int64 of shape (merged ranges,), in ascending
        order of address.
    """
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate((start + length)[order])
    region = np.searchsorted(np.array(sorted(region_starts), np.int64), start, "right")
    first = np.concatenate([[True], (start[1:] > stop[:-1] + gap_bytes) | (region[1:] != region[:-1])])
    last = np.concatenate([first[1:], [True]])
    return start[first], stop[last] - start[first]


def _map_to_image(copy: StridedCopy, side: Side, at: Int64s, inside: Int64s) -> list[StridedCopy]:
    """Replace the addresses of one side of a strided copy by offsets in an image (packed cell).

    If the strides are not constant in the image, the copy is split into several copies with constant strides.

    Args:
        copy: strided copy (nested loops over runs).
        side: side whose addresses are replaced, ``"src"`` or ``"dst"``.
        at: first address of each memory range that the image contains, int64 of shape (ranges,), ascending.
        inside: byte offset of each of these ranges in the image, int64 of shape (ranges,).
    """
    _, outer = _side_runs(copy, side)
    starts = _starts(_address(copy, side), outer)
    index = np.searchsorted(at, starts, "right") - 1
    offsets = (inside[index] + starts - at[index]).reshape([count for count, _ in outer])
    first = int(offsets.flat[0])
    strides = _image_strides(copy, side, outer, offsets)
    if strides is not None:
        return [_with_side(copy, side, first, strides)]
    widest = max(range(len(copy.loops)), key=lambda number: abs(_distance(copy.loops[number], side)))
    loop = copy.loops[widest]
    rest = replace(copy, loops=copy.loops[:widest] + copy.loops[widest + 1 :])
    parts = [rest.at(i * loop.src, i * loop.dst) for i in range(loop.count)]
    return [copy for part in parts for copy in _map_to_image(part, side, at, inside)]


def _image_strides(
    copy: StridedCopy, side: Side, outer: Sequence[tuple[int, int]], offsets: Int64s
) -> tuple[int, ...] | None:
    """Return the stride in bytes that each loop of a strided copy has in an image (packed cell).

    Return None if a loop has no constant stride in the image.

    Args:
        copy: strided copy (nested loops over runs).
        side: side whose addresses are replaced by offsets in the image.
        outer: loops over the copy's contiguous runs on this side, from `_side_runs`. An entry is (count,
            stride in bytes).
        offsets: byte offset of each of these runs in the image, int64, with one axis per loop in `outer`.
    """
    steps = []
    expected = np.full(offsets.shape, offsets.flat[0], np.int64)
    for axis, (count, _) in enumerate(outer):
        index = [0] * len(outer)
        index[axis] = 1
        step = int(offsets[tuple(index)] - offsets.flat[0])
        shape = [1] * len(outer)
        shape[axis] = count
        expected = expected + (np.arange(count, dtype=np.int64) * step).reshape(shape)
        steps.append(step)
    if not np.array_equal(expected, offsets):
        return None
    # Loops inside a contiguous run keep their stride. The others are `outer`, in ascending order of stride.
    ascending = sorted(range(len(copy.loops)), key=lambda number: abs(_distance(copy.loops[number], side)))
    inner = len(copy.loops) - len(outer)
    found = {number: _distance(copy.loops[number], side) for number in ascending[:inner]}
    found |= dict(zip(ascending[inner:], steps, strict=True))
    return tuple(found[number] for number in range(len(copy.loops)))


def _with_side(copy: StridedCopy, side: Side, first: int, strides: Sequence[int]) -> StridedCopy:
    if side == "src":
        loops = tuple(replace(loop, src=d) for loop, d in zip(copy.loops, strides, strict=True))
        return replace(copy, src=first, loops=loops)
    loops = tuple(replace(loop, dst=d) for loop, d in zip(copy.loops, strides, strict=True))
    return replace(copy, dst=first, loops=loops)
