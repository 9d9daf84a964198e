"""Draw the table of layouts as an SVG picture.

Each model has a row of panels, one per layout. A panel has a group of bars for every pair of parallel sizes,
one bar per method. A bar is the speed as a multiple of raw NIXL's, with the range over all rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.layout.cells import CHOSEN, METHODS, LayoutTable
from benchmarks.svg import LINE, svg
from kvferry.planning.strategy import Strategy

_COLOURS = {
    Strategy.DIRECT: "#b8c4ce", Strategy.OVER_READ: "#e0a458", Strategy.STAGED: "#5b8e7d", CHOSEN: "#1f3a5f",
}  # fmt: skip
_GROUP_INCHES, _MODEL_INCHES, _MARGIN_INCHES = 0.6, 2.6, 1.0
_BAR = 1 / (len(METHODS) + 1)
"""Width of a bar; a group of bars is 1 wide."""


def picture(tables: Sequence[LayoutTable]) -> str:
    """Return the text of an SVG picture of all tables."""
    width = max(_MARGIN_INCHES + _GROUP_INCHES * len(table.rows) for table in tables)
    return svg(max(width, 6.0), _MODEL_INCHES * len(tables), lambda figure: _models(figure, tables))


def _models(figure: Figure, tables: Sequence[LayoutTable]) -> None:
    figure.subplots_adjust(hspace=0.5)
    for number, table in enumerate(tables, 1):
        axes = figure.add_subplot(len(tables), 1, number)
        _groups(axes, table)
        axes.set_title(table.model, loc="left", weight="bold")
        if number == 1:
            axes.legend(
                title="Speed as a multiple of raw NIXL with 2 MiB descriptors",
                loc="lower left",
                bbox_to_anchor=(0, 1.12),
                ncols=len(METHODS),
                frameon=False,
                alignment="left",
            )


def _groups(axes: Axes, table: LayoutTable) -> None:
    places: list[float] = []
    panels: list[tuple[float, str]] = []
    for panel, (layout, rows) in enumerate(groupby(table.rows, key=lambda row: row.cell.layout)):
        first = len(places) + panel * 0.6  # a gap between panels
        places += [first + index for index, _ in enumerate(rows)]
        panels.append(((first + places[-1]) / 2, layout))
    for number, way in enumerate(METHODS):
        ratios = [row.ratio(way) for row in table.rows]
        lefts = [place + (number - (len(METHODS) - 1) / 2) * _BAR for place in places]
        bars = axes.bar(lefts, [one.median for one in ratios], _BAR, color=_COLOURS[way], label=str(way))
        for bar, row, ratio in zip(bars, table.rows, ratios, strict=True):
            bar.set_gid(f"{table.model} {row.cell} {way} {ratio.median:.2f}")
        axes.vlines(lefts, [one.low for one in ratios], [one.high for one in ratios], color=LINE, alpha=0.45)
    axes.axhline(1, color="#9aa7b1")
    axes.set_xticks(places, [f"{row.cell.src_tp}→{row.cell.dst_tp}" for row in table.rows])
    axes.tick_params(axis="both", length=0)
    axes.grid(axis="y")
    for place, layout in panels:
        axes.annotate(
            layout,
            (place, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -22),
            textcoords="offset points",
            ha="center",
            va="top",
            weight="bold",
        )
