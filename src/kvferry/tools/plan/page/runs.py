"""The runs of bytes that are copied between the strips of both sides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.tools.plan.page.strips import Strip
from kvferry.planning.template import Route


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """Copied bytes that are drawn as one band: a run, a part of a run, or parts of several runs.

    Attributes:
        src, dst: address of the first byte on each side.
        src_span, dst_span: number of bytes from the first to the last byte, gaps included, on each side.
        bytes: number of copied bytes.
        longest: length of the longest of these runs. A part of a run counts with the length of the whole run.
        pieces: number of runs, or parts of runs.
    """

    src: int
    dst: int
    src_span: int
    dst_span: int
    bytes: int
    longest: int
    pieces: int = 1


def runs_of(route: Route, src_blocks: int, dst_blocks: int) -> Iterator[DrawnRun]:
    """Yield the runs that are copied from the source's first blocks to the destination's first blocks."""
    cells = max(min(dst_blocks * route.dst_cells, src_blocks * route.src_cells), 1)
    for cell in range(cells):
        src_block, src_cell = divmod(cell, route.src_cells)
        dst_block, dst_cell = divmod(cell, route.dst_cells)
        for cell_copy in route.cell_copies:
            src = src_block * route.src_stride + cell_copy.src_offsets[src_cell]
            dst = dst_block * route.dst_stride + cell_copy.dst_offsets[dst_cell]
            pieces = cell_copy.descriptors
            rows = zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.length.tolist(), strict=True)
            for a, b, length in rows:
                yield DrawnRun(a + src, b + dst, length, length, length, length)


def cut(run: DrawnRun, src: Sequence[Strip], dst: Sequence[Strip]) -> Iterator[tuple[int, int, DrawnRun]]:
    """Divide a run into parts, so that each is inside one strip on both sides. Strips are sorted by address.

    Yields:
        (index of the source's strip, index of the destination's strip, part of the run).
    """
    at = 0
    while at < run.bytes:
        a, b = _next(src, run.src + at), _next(dst, run.dst + at)
        if a is None or b is None:
            return
        skip = max(src[a].address - run.src, dst[b].address - run.dst, at) - at
        if skip:
            at += skip
            continue
        size = min(src[a].stop - run.src, dst[b].stop - run.dst, run.bytes) - at
        yield a, b, DrawnRun(run.src + at, run.dst + at, size, size, size, run.longest)
        at += size


def by_strip(parts: Iterable[tuple[int, int, DrawnRun]]) -> list[DrawnRun]:
    """Join the copied bytes that connect the same two strips.

    Args:
        parts: tuples as `cut` yields them.
    """
    joined: dict[tuple[int, int], DrawnRun] = {}
    for a, b, part in parts:
        before = joined.get((a, b))
        joined[a, b] = part if before is None else _both(before, part)
    return list(joined.values())


def _next(strips: Sequence[Strip], address: int) -> int | None:
    """Return the index of the first strip that ends after an address; None if there is none."""
    number = bisect_right(strips, address, key=lambda strip: strip.stop)
    return number if number < len(strips) else None


def _both(one: DrawnRun, other: DrawnRun) -> DrawnRun:
    src, dst = min(one.src, other.src), min(one.dst, other.dst)
    return DrawnRun(
        src=src,
        dst=dst,
        src_span=max(one.src + one.src_span, other.src + other.src_span) - src,
        dst_span=max(one.dst + one.dst_span, other.dst + other.dst_span) - dst,
        bytes=one.bytes + other.bytes,
        longest=max(one.longest, other.longest),
        pieces=one.pieces + other.pieces,
    )
