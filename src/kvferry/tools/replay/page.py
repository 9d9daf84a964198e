"""Replays and sizings as one self-contained HTML file: the curve as a picture, and the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from math import ceil, floor, log2

from kvferry.common.units import format_bytes
from kvferry.tools.plan.page.document import html_page, text_block
from kvferry.tools.replay.curve import CurvePoint
from kvferry.tools.replay.show import Outcome, show, show_size
from kvferry.tools.replay.sizing import Sizing
from kvferry.tools.report import Report

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 300, 52, 28
_LABELS = 6


def page(found: Outcome) -> str:
    """Return the HTML page of a replay."""
    name = f"{found.replayed.model.name} on {found.trace}"
    return _page(name, found.curve, partial(show, found))


def size_page(found: Sizing, trace: str) -> str:
    """Return the HTML page of the answer to a sizing question."""
    return _page(f"{found.model.name} on {trace}", found.curve, partial(show_size, found))


def _page(name: str, points: Sequence[CurvePoint], print_text: Callable[[Report], None]) -> str:
    return html_page(name, [f"<h1>{escape(name)}</h1>", *curve_section(points), text_block(print_text)])


def curve_section(points: Sequence[CurvePoint], about: str = "") -> Iterator[str]:
    """Yield the HTML of a hit-rate curve, with `about` as plain text; nothing for fewer than two points."""
    if len(points) < 2:
        return
    yield "<section><h2>Hit rate by capacity of host memory</h2>"
    yield (
        "<p>Share of the prompt tokens that need not be computed. The capacity doubles from line to "
        f"line. At {format_bytes(points[-1].capacity_bytes)} it is {points[-1].hit_rate:.1%}.</p>"
    )
    if about:
        yield f"<p>{escape(about)}</p>"
    yield _drawing(points)
    yield "</section>"


def _drawing(points: Sequence[CurvePoint]) -> str:
    """Return the curve as SVG: capacity from left to right on a logarithmic scale, hit rate upwards."""
    low, high = log2(points[0].capacity_bytes), log2(points[-1].capacity_bytes)
    # The axis ends at the next tenth above the curve.
    top = max(ceil(10 * max(point.hit_rate for point in points)) / 10, 0.1)

    def across(capacity: float) -> float:
        return _LEFT + (log2(capacity) - low) / (high - low) * (_WIDTH - _LEFT)

    def down(rate: float) -> float:
        return (1 - rate / top) * _HEIGHT

    line = " ".join(f"{across(p.capacity_bytes):.1f},{down(p.hit_rate):.1f}" for p in points)
    parts = [
        f'<polyline class="rule" points="{line}" style="stroke:var(--l0);stroke-width:3"/>',
        *(
            f'<circle cx="{across(p.capacity_bytes):.1f}" cy="{down(p.hit_rate):.1f}" r="4" class="l0">'
            f"<title>{format_bytes(p.capacity_bytes)}: {p.hit_rate:.1%}</title></circle>"
            for p in points
        ),
    ]
    for number in range(round(top * 10) + 1):
        rate = number / 10
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{down(rate):.1f}" y2="{down(rate):.1f}" class="rule"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{down(rate) + 5:.1f}" text-anchor="end">{rate:.0%}</text>')
    doublings = range(ceil(low), floor(high) + 1)
    parts += [
        f'<text x="{across(2**power):.1f}" y="{_HEIGHT + _BOTTOM - 6}" text-anchor="middle">'
        f"{format_bytes(2**power)}</text>"
        for power in doublings[:: -(-len(doublings) // _LABELS) or 1]
    ]
    return (
        f'<div class="wide"><svg viewBox="0 -12 {_WIDTH + 24} {_HEIGHT + _BOTTOM + 12}" role="img" '
        'aria-label="hit rate by capacity" style="height:auto;min-width:480px" fill="currentColor" '
        f'font-size="14">{"".join(parts)}</svg></div>'
    )
