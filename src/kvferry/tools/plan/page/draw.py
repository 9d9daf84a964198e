"""Drawing of a transfer as SVG: the source's memory above, the destination's below, copies in between.

A *strip* is a contiguous piece of memory, drawn as a rectangle. A *lane* is the row of strips of one rank. A
*ribbon* connects the source and the destination of a copied run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from kvferry.common.units import format_bytes
from kvferry.geometry import Group, PageFormat, join_loops, loop_offsets
from kvferry.planning import Int64s, Route, merge

WIDTH = 1000.0
_GAP = 5.0
_BETWEEN_RANKS = 18.0
_MOST_GAPS = WIDTH / 3
# Distinct colours for layers, and for ranks of the destination. The colours repeat.
COLOURS = 6

_BAR = 26
_BETWEEN = 110
_RULE = 16
_LEAST_WIDTH = 0.4
_LONGEST_RULE = 0.2


@dataclass(frozen=True, slots=True)
class Strip:
    """A contiguous piece of memory with bytes of one layer, by index in its group and name, and one block."""

    address: int
    length: int
    layer: int
    block: int
    name: str

    @property
    def stop(self) -> int:
        return self.address + self.length


def strips(group: Group, layers: Sequence[int], blocks: int) -> list[Strip]:
    """Return the strips of blocks 0 to ``blocks - 1`` in some layers of a group, sorted by address."""
    found = []
    for number in layers:
        layer = group.layers[number]
        starts, lengths = _stretches(layer.page)
        for block in range(blocks):
            base = layer.address + block * layer.block_stride
            found += [
                Strip(base + start, length, number, block, layer.name)
                for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
            ]
    return sorted(found, key=lambda strip: strip.address)


def _stretches(page: PageFormat) -> tuple[Int64s, Int64s]:
    """Return (offsets, lengths) in bytes of the contiguous pieces of a page, ascending, int64."""
    starts, lengths = [], []
    for field in page.fields:
        run, outer = join_loops(field.item_bytes, (loop for axis in field.axes for loop in axis.loops))
        starts.append(loop_offsets(field.offset, outer))
        lengths.append(np.full(len(starts[-1]), run, np.int64))
    start, length = np.concatenate(starts), np.concatenate(lengths)
    order = np.argsort(start)
    # Fields such as K and V may be adjacent.
    found = merge(start[order], start[order], length[order])
    return found.src, found.length


@dataclass(frozen=True, slots=True)
class MemoryLane:
    """The memory of one rank to draw as a row in a picture: its name, and strips sorted by address."""

    label: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class _DrawnLane:
    """A lane with its horizontal positions in SVG units: `starts` is that of each strip's first byte."""

    lane: MemoryLane
    starts: tuple[float, ...]
    per_byte: float

    def at(self, address: int) -> float:
        """Return the horizontal position of an address; of the preceding strip's end if it is between two."""
        strips = self.lane.strips
        number = max(bisect_right(strips, address, key=lambda strip: strip.address) - 1, 0)
        inside = min(address - strips[number].address, strips[number].length)
        return self.starts[number] + inside * self.per_byte

    def interval(self, address: int, length: int) -> tuple[float, float]:
        return self.at(address), self.at(address + length - 1) + self.per_byte

    def where(self, address: int) -> str:
        return f"{self.lane.label} + {address - self.lane.strips[0].address:,}"


def place(lanes: Sequence[MemoryLane]) -> list[_DrawnLane]:
    """Place the memory of all ranks of one engine next to each other."""
    total = sum(strip.length for lane in lanes for strip in lane.strips) or 1
    breaks = sum(a.stop != b.address for lane in lanes for a, b in pairwise(lane.strips))
    gap = min(_GAP, _MOST_GAPS / breaks) if breaks else 0.0
    between = _BETWEEN_RANKS * max(len(lanes) - 1, 0)
    per_byte = (WIDTH - gap * breaks - between) / total
    x, placed = 0.0, []
    for lane in lanes:
        starts = []
        for number, strip in enumerate(lane.strips):
            if number and lane.strips[number - 1].stop != strip.address:
                x += gap
            starts.append(x)
            x += strip.length * per_byte
        placed.append(_DrawnLane(lane, tuple(starts), per_byte))
        x += _BETWEEN_RANKS
    return placed


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """Copied bytes that are drawn as one band: a run, a part of a run, or parts of several runs.

    Attributes:
        src, dst: address of the first byte on each side.
        src_span, dst_span: number of bytes from the first to the last byte, gaps included, on each side.
        longest: length of the longest of these runs. A part of a run counts with the length of the whole run.
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
    """Join the copied bytes that connect the same two strips."""
    joined: dict[tuple[int, int], DrawnRun] = {}
    for a, b, part in parts:
        if (one := joined.setdefault((a, b), part)) is part:
            continue
        src, dst = min(one.src, part.src), min(one.dst, part.dst)
        joined[a, b] = DrawnRun(
            src=src,
            dst=dst,
            src_span=max(one.src + one.src_span, part.src + part.src_span) - src,
            dst_span=max(one.dst + one.dst_span, part.dst + part.dst_span) - dst,
            bytes=one.bytes + part.bytes,
            longest=max(one.longest, part.longest),
            pieces=one.pieces + part.pieces,
        )
    return list(joined.values())


def _next(strips: Sequence[Strip], address: int) -> int | None:
    """Return the index of the first strip that ends after an address; None if there is none."""
    number = bisect_right(strips, address, key=lambda strip: strip.stop)
    return number if number < len(strips) else None


@dataclass(frozen=True, slots=True)
class Ribbon:
    """A band that connects copied bytes in a lane of the source and a lane of the destination, by index."""

    src: int
    dst: int
    run: DrawnRun


def drawing(
    title: str, src: Sequence[MemoryLane], dst: Sequence[MemoryLane], ribbons: Sequence[Ribbon]
) -> str:
    """Draw memory copies as HTML: an SVG with the names of ranks beside it. `title` is for screen readers.

    Each lane has at least one strip.
    """
    above, below = place(src), place(dst)
    low = _BAR + _BETWEEN
    height = low + _BAR + _RULE
    scale, rule = _scale(above[0].per_byte, height)
    parts = [
        *(_ribbon(ribbon, above, below, (_BAR, low)) for ribbon in ribbons),
        *_bars(above, 0),
        *_bars(below, low),
        rule,
    ]
    opening = (
        f'<svg viewBox="0 0 {WIDTH:.0f} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">'
    )
    picture = f"{opening}{''.join(parts)}</svg>"
    return f"{_labels(src)}{picture}{_labels(dst)}<p>The bar at the lower left is {scale} long.</p>"


def _labels(lanes: Sequence[MemoryLane]) -> str:
    # Text in a picture shrinks with it on a small screen.
    names = "".join(f"<span>{escape(lane.label)}</span>" for lane in lanes)
    return f'<div class="ranks">{names}</div>'


def _bars(placed: Sequence[_DrawnLane], y: int) -> Iterator[str]:
    for each in placed:
        for x, strip in zip(each.starts, each.lane.strips, strict=True):
            width = max(strip.length * each.per_byte, _LEAST_WIDTH)
            said = f"{strip.name}, block {strip.block}: {format_bytes(strip.length)}"
            yield (
                f'<rect class="l{strip.layer % COLOURS}" x="{x:.2f}" y="{y}" '
                f'width="{width:.2f}" height="{_BAR}">'
                f"<title>{escape(said)}</title></rect>"
            )


def _ribbon(
    ribbon: Ribbon, above: Sequence[_DrawnLane], below: Sequence[_DrawnLane], between: tuple[int, int]
) -> str:
    run, src, dst = ribbon.run, above[ribbon.src], below[ribbon.dst]
    (a, b), (c, d) = src.interval(run.src, run.src_span), dst.interval(run.dst, run.dst_span)
    high, low = between
    half = (high + low) / 2
    path = (
        f"M{a:.2f},{high}C{a:.2f},{half} {c:.2f},{half} {c:.2f},{low}"
        f"H{d:.2f}C{d:.2f},{half} {b:.2f},{half} {b:.2f},{high}Z"
    )
    many = (
        f"{format_bytes(run.bytes)} in {run.pieces:,} pieces" if run.pieces > 1 else format_bytes(run.bytes)
    )
    part = f" of a run of {format_bytes(run.longest)}" if run.longest > run.bytes else ""
    said = f"{many}{part}, from {src.where(run.src)} to {dst.where(run.dst)}"
    return f'<path class="r{ribbon.dst % COLOURS}" d="{path}"><title>{escape(said)}</title></path>'


def _scale(per_byte: float, bottom: int) -> tuple[str, str]:
    """Return what the scale bar stands for, and its SVG."""
    # The largest power of two for which the bar is at most a fifth of the picture's width long.
    step = 1
    while 2 * step * per_byte <= _LONGEST_RULE * WIDTH:
        step *= 2
    return format_bytes(step), f'<path class="rule" d="M0.5,{bottom - 7}v6h{step * per_byte:.2f}v-6"/>'
