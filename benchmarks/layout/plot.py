"""Draw the table of layouts as an SVG picture.

Each model has a row of panels, one per layout. A panel has a group of bars for every pair of parallel sizes,
one bar per method. A bar is the speed as a multiple of raw NIXL's, with the range over all rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from benchmarks.layout.cells import CHOSEN, METHODS, LayoutRow, LayoutTable
from kvferry.planning.strategy import Strategy

_COLOURS = {
    Strategy.DIRECT: "#b8c4ce", Strategy.OVER_READ: "#e0a458", Strategy.STAGED: "#5b8e7d", CHOSEN: "#1f3a5f",
}  # fmt: skip
_BAR, _GAP, _PANEL_GAP = 11, 14, 26
_HEIGHT, _TOP, _ROW = 150, 64, 262
_LEFT, _RIGHT = 44, 16
_STEP = 0.25
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24303a}.s{font-size:10.5px;fill:#5c6a76}.b{font-weight:600}"
)


def picture(tables: Sequence[LayoutTable]) -> str:
    """Return the text of an SVG picture of all tables."""
    widest = max(_width(table) for table in tables)
    height = _TOP + _ROW * len(tables)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{widest}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{widest}" height="{height}" fill="#fff"/>',
        *_legend(),
    ]
    for number, table in enumerate(tables):
        parts += _model(table, _TOP + _ROW * number)
    return "\n".join([*parts, "</svg>", ""])


def _panels(table: LayoutTable) -> dict[str, list[LayoutRow]]:
    panels: dict[str, list[LayoutRow]] = {}
    for row in table.rows:
        panels.setdefault(row.cell.layout, []).append(row)
    return panels


def _cluster() -> int:
    return _BAR * len(METHODS) + _GAP


def _width(table: LayoutTable) -> int:
    return max(_LEFT + len(table.rows) * _cluster() + len(_panels(table)) * _PANEL_GAP + _RIGHT, 560)


def _legend() -> Iterator[str]:
    yield '<text x="16" y="24" class="b">Speed as a multiple of raw NIXL with 2 MiB descriptors</text>'
    for number, way in enumerate(METHODS):
        x = 16 + number * 96
        yield f'<rect x="{x}" y="36" width="10" height="10" fill="{_COLOURS[way]}"/>'
        yield f'<text x="{x + 15}" y="45">{way}</text>'


def _model(table: LayoutTable, top: int) -> Iterator[str]:
    highest = max(max(ratios) for row in table.rows for ratios in row.ratios.values())
    scale = max(1.0, -(-highest // _STEP) * _STEP)
    base = top + 30 + _HEIGHT
    right = _width(table) - _RIGHT
    yield f'<text x="16" y="{top + 14}" class="b">{escape(table.model)}</text>'
    for tick in range(round(scale / _STEP) + 1):
        y = base - tick * _STEP / scale * _HEIGHT
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{"#9aa7b1" if tick * _STEP == 1 else "#e6eaed"}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" class="s">{tick * _STEP:g}</text>'
    x = float(_LEFT + _PANEL_GAP / 2)
    for layout, rows in _panels(table).items():
        start = x
        for row in rows:
            yield from _bars(row, x, base, scale)
            x += _cluster()
        middle = (start + x - _GAP) / 2
        yield f'<text x="{middle:.1f}" y="{base + 34}" text-anchor="middle" class="b">{layout}</text>'
        x += _PANEL_GAP


def _bars(row: LayoutRow, x: float, base: float, scale: float) -> Iterator[str]:
    for number, way in enumerate(METHODS):
        ratio, left = row.ratio(way), x + number * _BAR
        low, middle, high = (base - v / scale * _HEIGHT for v in (ratio.low, ratio.median, ratio.high))
        yield (
            f'<rect x="{left:.1f}" y="{middle:.1f}" width="{_BAR - 1}" height="{base - middle:.1f}" '
            f'fill="{_COLOURS[way]}"><title>{escape(str(row.cell))} {way} {ratio.median:.2f}</title></rect>'
        )
        yield f'<path d="M{left + _BAR / 2 - 0.5:.1f} {low:.1f}V{high:.1f}" stroke="#24303a" opacity=".45"/>'
    middle = x + _BAR * len(METHODS) / 2
    text = f"{row.cell.src_tp}→{row.cell.dst_tp}"
    yield f'<text x="{middle:.1f}" y="{base + 16}" text-anchor="middle" class="s">{text}</text>'
