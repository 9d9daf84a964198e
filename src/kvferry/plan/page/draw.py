"""Drawing of a transfer as SVG: the source's memory above, the destination's below, copies in between.

A *strip* is a contiguous piece of memory, drawn as a rectangle. A *lane* is the row of strips of one rank. A
*ribbon* connects the source and the destination of a copied run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from kvferry.plan.page.place import WIDTH, DrawnLane, MemoryLane, place
from kvferry.plan.page.runs import DrawnRun
from kvferry.units import format_bytes

COLOURS = 6
"""Number of distinct colours for layers, and for ranks of the destination. The colours repeat."""

_BAR = 26
_LABEL = 18
_BETWEEN = 110
_RULE = 24
_LEAST_WIDTH = 0.4
_LONGEST_RULE = 0.2


@dataclass(frozen=True, slots=True)
class Ribbon:
    """A drawn band that connects copied bytes in the source's memory to the same bytes at the destination.

    A lane is the row of memory pieces of one rank in the picture.

    Attributes:
        src, dst: index of the lane among the source's lanes, and among the destination's lanes.
        run: copied bytes.
    """

    src: int
    dst: int
    run: DrawnRun


def drawing(
    title: str, src: Sequence[MemoryLane], dst: Sequence[MemoryLane], ribbons: Sequence[Ribbon]
) -> str:
    """Draw memory copies as an SVG element: the source's memory above, the destination's memory below.

    A lane is the row of strips (contiguous pieces of memory) of one rank. A ribbon is a band that connects
    copied bytes of both sides.

    Args:
        title: description of the picture for screen readers.
        src, dst: lanes of the source and of the destination, each with at least one strip.
        ribbons: bands to draw between the lanes.
    """
    above, below = place(src), place(dst)
    top, bottom = _LABEL, _LABEL + _BAR + _BETWEEN
    height = bottom + _BAR + _LABEL + _RULE
    parts = [
        *(_ribbon(ribbon, above, below, (top + _BAR, bottom)) for ribbon in ribbons),
        *_bars(above, top, top - 5),
        *_bars(below, bottom, bottom + _BAR + _LABEL - 4),
        _rule(above[0].per_byte, height - 6),
    ]
    opening = f'<svg viewBox="0 0 {WIDTH:.0f} {height}" role="img" aria-label="{escape(title)}">'
    return f"{opening}{''.join(parts)}</svg>"


def _bars(placed: Sequence[DrawnLane], y: int, label_y: int) -> Iterator[str]:
    for each in placed:
        for x, strip in zip(each.starts, each.lane.strips, strict=True):
            width = max(strip.length * each.per_byte, _LEAST_WIDTH)
            said = f"{strip.name}, block {strip.block}: {format_bytes(strip.length)}"
            yield (
                f'<rect class="l{strip.layer % COLOURS}" x="{x:.2f}" y="{y}" '
                f'width="{width:.2f}" height="{_BAR}">'
                f"<title>{escape(said)}</title></rect>"
            )
        yield f'<text x="{each.starts[0]:.1f}" y="{label_y}">{escape(each.lane.label)}</text>'


def _ribbon(
    ribbon: Ribbon, above: Sequence[DrawnLane], below: Sequence[DrawnLane], between: tuple[int, int]
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
    said = f"{many}{part}, from {_where(src, run.src)} to {_where(dst, run.dst)}"
    return f'<path class="r{ribbon.dst % COLOURS}" d="{path}"><title>{escape(said)}</title></path>'


def _where(placed: DrawnLane, address: int) -> str:
    return f"{placed.lane.label} + {address - placed.addresses[0]:,}"


def _rule(per_byte: float, y: int) -> str:
    """Return the SVG of a scale bar and its label.

    The bar stands for the largest power of two, in bytes, for which it is at most a fifth of the picture's
    width long. It stands for at least 1 byte.

    Args:
        per_byte: width of a byte in the picture, in SVG units.
        y: vertical position of the label, in SVG units.
    """
    step = 1
    while 2 * step * per_byte <= _LONGEST_RULE * WIDTH:
        step *= 2
    width = step * per_byte
    text = f'<text x="{width + 8:.1f}" y="{y}">{format_bytes(step)}</text>'
    return f'<path class="rule" d="M0.5,{y - 5}v5h{width:.2f}v-5"/>{text}'
