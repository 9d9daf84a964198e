"""Drawing of a transfer as SVG: the source's memory above, the destination's below, copies in between.

A *strip* is a contiguous piece of memory, drawn as a rectangle. A *lane* is the row of strips of one rank. A
*ribbon* connects the source and the destination of a copied run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from kvferry.tools.plan.page.place import WIDTH, DrawnLane, MemoryLane, place
from kvferry.tools.plan.page.runs import DrawnRun
from kvferry.units import format_bytes

# Distinct colours for layers, and for ranks of the destination. The colours repeat.
COLOURS = 6

_BAR = 26
_BETWEEN = 110
_RULE = 16
_LEAST_WIDTH = 0.4
_LONGEST_RULE = 0.2


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


def _bars(placed: Sequence[DrawnLane], y: int) -> Iterator[str]:
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


def _scale(per_byte: float, bottom: int) -> tuple[str, str]:
    """Return what the scale bar stands for, and its SVG."""
    # The largest power of two for which the bar is at most a fifth of the picture's width long.
    step = 1
    while 2 * step * per_byte <= _LONGEST_RULE * WIDTH:
        step *= 2
    return format_bytes(step), f'<path class="rule" d="M0.5,{bottom - 7}v6h{step * per_byte:.2f}v-6"/>'
