"""Packed cells: contiguous buffers (*images*) for cells whose runs are too short to transfer one by one.

- *Gathered*: the source packs what it supplies in the destination's byte order. The destination reads each
  run that is contiguous in its own memory with one descriptor, into place.
- *Fetched*: the destination reads contiguous ranges of the source, and gaps too if a gap is cheaper than
  another descriptor. Then it copies the bytes into place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.geometry.page import join_loops, loop_offsets
from kvferry.planning.cell_copy import CellCopy, Offsets, PoolCopies, PoolDescriptors
from kvferry.planning.descriptors import Descriptors, Int64s
from kvferry.planning.strided_copy import Loop, StridedCopy

# Images start at multiples of 64 bytes, so that copies work on whole words.
ALIGNMENT = 64

# Cells that need more reads are not packed: many short reads are what packing should avoid.
MAX_READS = 1 << 16


@dataclass(frozen=True, slots=True)
class PackedImage:
    """The layout of images that each hold one packed cell.

    `pool_copies` go from the source's blocks to a gathered image, or from a fetched image to the
    destination's blocks, at absolute addresses in block 0. `reads` go from a gathered image to the
    destination, or from the source to a fetched image.
    """

    stride: int  # bytes from one image to the next, a multiple of `ALIGNMENT`
    pool_copies: tuple[PoolCopies, ...]
    reads: tuple[PoolDescriptors, ...]

    @property
    def bytes(self) -> int:
        return sum(each.descriptors.total_bytes for each in self.reads)

    @property
    def longest(self) -> int:
        return max(int(each.descriptors.length.max()) for each in self.reads)


def gather_image(cell_copies: Iterable[CellCopy]) -> PackedImage | None:
    """Return the layout of images that the source packs for the destination to read.

    None if nothing is copied or an image would need more than `MAX_READS` reads. In this example, the source
    has one buffer per layer, and the destination stores all layers of one head together.

    >>> from kvferry.planning.cell_copy import ONE_CELL
    >>> copies = tuple(StridedCopy(layer * 1000, layer * 8, 8, (Loop(2, 8, 24),)) for layer in range(3))
    >>> image = gather_image([CellCopy(ONE_CELL, ONE_CELL, copies)])
    >>> image.pool_copies[0].nests[1]
    StridedCopy(src=1000, dst=8, run=8, loops=(Loop(count=2, src=8, dst=24),))
    >>> reads = image.reads[0].descriptors
    >>> reads.src.tolist(), reads.dst.tolist(), reads.length.tolist()  # one read: 2 heads, 3 layers, 8 bytes
    ([0], [0], [48])
    """
    # Packing is unpacking run backwards: fetch from the destination to the source, then swap the sides.
    image = fetch_image(
        (CellCopy(one.dst_offsets, one.src_offsets, tuple(map(_swap, one.copies))) for one in cell_copies), 0
    )
    if image is None:
        return None
    copies = tuple(PoolCopies(each.at, tuple(map(_swap, each.nests))) for each in image.pool_copies)
    reads = tuple(
        PoolDescriptors(each.at, Descriptors(found.dst, found.src, found.length))
        for each in image.reads
        for found in [each.descriptors]
    )
    return PackedImage(image.stride, copies, reads)


def fetch_image(
    cell_copies: Iterable[CellCopy], gap_bytes: int, region_starts: Sequence[int] = ()
) -> PackedImage | None:
    """Return the layout of images that the destination reads from the source and then unpacks.

    Gaps of up to `gap_bytes` are read. No read crosses a start of the source's regions: it would fail.
    """
    by_offsets = defaultdict[Offsets, list[tuple[Offsets, StridedCopy]]](list)
    for cell_copy in cell_copies:
        by_offsets[cell_copy.src_offsets] += [
            (cell_copy.dst_offsets, part) for copy in cell_copy.copies for part in copy.ascending()
        ]
    copies = defaultdict[Offsets, list[StridedCopy]](list)
    reads = list[PoolDescriptors]()
    size = 0
    for at, parts in by_offsets.items():
        packed = _pack([part for _, part in parts], gap_bytes, region_starts, size)
        if packed is None:
            return None
        placed, descriptors = packed
        reads.append(PoolDescriptors(at, descriptors))
        size += descriptors.total_bytes
        for (other, _), found in zip(parts, placed, strict=True):
            copies[other] += found
    if not size or sum(len(each.descriptors) for each in reads) > MAX_READS:
        return None
    stride = -(-size // ALIGNMENT) * ALIGNMENT
    return PackedImage(stride, tuple(PoolCopies(at, tuple(of)) for at, of in copies.items()), tuple(reads))


def _pack(
    copies: Sequence[StridedCopy], gap_bytes: int, region_starts: Sequence[int], first: int
) -> tuple[list[list[StridedCopy]], Descriptors] | None:
    """Return, for each given copy, the copies out of the image; and the reads of its bytes from `first`."""
    if not copies:
        return None
    runs = [_source_runs(copy) for copy in copies]
    # Counted before they are listed, because a peer's page format may claim any number of runs.
    if sum(int(np.prod([count for count, _ in outer])) for _, outer in runs) > MAX_READS:
        return None
    starts = [loop_offsets(copy.src, outer) for copy, (_, outer) in zip(copies, runs, strict=True)]
    lengths = [np.full(len(start), length, np.int64) for start, (length, _) in zip(starts, runs, strict=True)]
    at, length = _merge_ranges(np.concatenate(starts), np.concatenate(lengths), gap_bytes, region_starts)
    inside = first + np.concatenate([[0], np.cumsum(length)[:-1]])
    return [_map_to_image(copy, at, inside) for copy in copies], Descriptors(at, inside, length)


def _swap(copy: StridedCopy) -> StridedCopy:
    loops = tuple(Loop(loop.count, loop.dst, loop.src) for loop in copy.loops)
    return StridedCopy(copy.dst, copy.src, copy.run, loops)


def _source_runs(copy: StridedCopy) -> tuple[int, list[tuple[int, int]]]:
    # A run may be longer than the runs of the copy, which are contiguous on both sides.
    return join_loops(copy.run, ((loop.count, loop.src) for loop in copy.loops))


def _merge_ranges(
    start: Int64s, length: Int64s, gap_bytes: int, region_starts: Sequence[int]
) -> tuple[Int64s, Int64s]:
    """Return (address, length) of the ranges, after merging those that touch, overlap or are close."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate((start + length)[order])
    region = np.searchsorted(np.array(sorted(region_starts), np.int64), start, "right")
    first = np.concatenate([[True], (start[1:] > stop[:-1] + gap_bytes) | (region[1:] != region[:-1])])
    last = np.concatenate([first[1:], [True]])
    return start[first], stop[last] - start[first]


def _map_to_image(copy: StridedCopy, at: Int64s, inside: Int64s) -> list[StridedCopy]:
    """Replace source addresses by offsets `inside` an image of the memory ranges at `at`, ascending."""
    _, outer = _source_runs(copy)
    starts = loop_offsets(copy.src, outer)
    index = np.searchsorted(at, starts, "right") - 1
    offsets = (inside[index] + starts - at[index]).reshape([count for count, _ in outer])
    strides = _image_strides(copy, outer, offsets)
    if strides is not None:
        loops = tuple(replace(loop, src=stride) for loop, stride in zip(copy.loops, strides, strict=True))
        return [replace(copy, src=int(offsets.flat[0]), loops=loops)]
    # Ranges of different lengths give a loop different strides in the image. Splitting the loop with the
    # widest stride first leaves the fewest copies.
    widest = max(range(len(copy.loops)), key=lambda number: abs(copy.loops[number].src))
    return [found for part in copy.unroll(widest) for found in _map_to_image(part, at, inside)]


def _image_strides(
    copy: StridedCopy, outer: Sequence[tuple[int, int]], offsets: Int64s
) -> Sequence[int] | None:
    """Return the stride that each loop has in an image; None if a loop has no constant stride there.

    `offsets` are those of the runs in the image, int64, with an axis per loop in `outer` (`_source_runs`).
    """
    first = int(offsets.flat[0])
    steps = [int(offsets.take(1, axis).flat[0]) - first for axis in range(offsets.ndim)]
    regular = loop_offsets(first, [(count, step) for (count, _), step in zip(outer, steps, strict=True)])
    if not np.array_equal(regular, offsets.reshape(-1)):
        return None
    # Loops inside a contiguous run keep their stride. The others are `outer`, in ascending order of stride.
    ascending = sorted(range(len(copy.loops)), key=lambda number: abs(copy.loops[number].src))
    strides = [loop.src for loop in copy.loops]
    for number, step in zip(ascending[len(copy.loops) - len(outer) :], steps, strict=True):
        strides[number] = step
    return strides
