"""Draw the ratios of a section as horizontal bars, in an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from benchmarks.page.figures import Comparison, Summary, format_ratio
from benchmarks.svg import LINE, svg
from kvferry.tools.measuring.rounds import Spread

_GOOD, _BEHIND = "#5b8e7d", "#c8553d"
_WIDTH_INCHES, _ROW_INCHES, _MARGIN_INCHES = 8.0, 0.24, 1.1
_DECADE = 10.0


def draw(summary: Summary) -> str | None:
    """Return an SVG picture of a section's ratios; None if no comparison has a ratio.

    A bar leads from 1 to the median of a ratio. A thin line is the range. The axis is logarithmic if the
    ratios span more than a decade.

    Args:
        summary: result of the section.
    """
    rows = [(one, one.ratio) for one in summary.comparisons if one.ratio is not None]
    if not rows:
        return None
    height = _MARGIN_INCHES + _ROW_INCHES * len(rows)
    return svg(_WIDTH_INCHES, height, lambda figure: _bars(figure, summary, rows))


def names(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a name for each bar, without the part that all bars have in common.

    Args:
        comparisons: comparisons that are drawn.
    """
    labels, others = {one.label for one in comparisons}, {one.against for one in comparisons}
    if len(others) == 1:
        return [one.label for one in comparisons]
    if len(labels) == 1:
        return [f"against {one.against}" for one in comparisons]
    return [f"{one.label}, against {one.against}" for one in comparisons]


def _bars(figure: Figure, summary: Summary, rows: Sequence[tuple[Comparison, Spread]]) -> None:
    axes = figure.add_subplot()
    ratios = [ratio for _, ratio in rows]
    if _is_wide(ratios):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.use_sticky_edges = False  # a margin beyond the last bar, too
    places = range(len(rows))
    colours = [_BEHIND if summary.is_behind(ratio) else _GOOD for ratio in ratios]
    axes.barh(places, [ratio.median - 1 for ratio in ratios], left=1, height=0.62, color=colours)
    axes.hlines(places, [r.low for r in ratios], [r.high for r in ratios], color=LINE, linewidth=0.9)
    axes.plot([ratio.median for ratio in ratios], places, "|", color=LINE, markersize=6)
    axes.axvline(1, color=LINE, linewidth=1.2)
    axes.set_yticks(places, names([one for one, _ in rows]))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x")
    for place, ratio in zip(places, ratios, strict=True):
        axes.annotate(
            format_ratio(ratio),
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    good = "below" if summary.low_is_good else "above"
    others = {one.against for one, _ in rows}
    other = others.pop() if len(others) == 1 else "the other"
    axes.set_xlabel(f"ratio: kvferry / {other} ({good} 1 is good; red: kvferry is behind)")


def _is_wide(ratios: Sequence[Spread]) -> bool:
    low, high = min(ratio.low for ratio in ratios), max(ratio.high for ratio in ratios)
    return low > 0 and high > _DECADE * low
