"""Building blocks of a dashboard: panels, rows and their queries."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.observe.dashboard.expressions import per_second, quantile, series, total
from kvferry.observe.exposed_names import ROUTER_PREFIX

SCOPE = {"instance": "$instance", "model_name": "$model", "engine": "$engine"}
"""Label patterns with the dashboard's variables, which restrict each query to the selected engines."""
# Grafana's own, which is long enough for the scrape interval.
_RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL query and the legend of its lines in a chart.

    Attributes:
        expression: PromQL expression.
        legend: text of the legend, with names of labels in double braces.
    """

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of the dashboard.

    Attributes:
        title: title of the panel.
        description: explanation that the panel shows.
        unit: name of the values' unit in Grafana.
        queries: PromQL queries whose results are drawn.
        stacked: True to stack the values, which is useful if their sum is meaningful.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A row of the dashboard: a heading with panels below it.

    Attributes:
        title: text of the heading.
        panels: panels below the heading.
        folded: True if the row is collapsed when the dashboard opens.
    """

    title: str
    panels: tuple[Panel, ...]
    folded: bool = False


def _scope(name: str) -> dict[str, str] | None:
    # The router is no engine, so it has none of these labels.
    return None if name.startswith(ROUTER_PREFIX) else SCOPE


def level(name: str, *by: str, **where: str) -> str:
    """Return a PromQL expression that sums a gauge over the engines selected in the dashboard, by label."""
    return total(series(name, _scope(name), **where), *by)


def rate(name: str, *by: str, **where: str) -> str:
    """Return a PromQL expression for a counter's rate per second over the selected engines, by label."""
    return total(per_second(series(name, _scope(name), **where), _RATE), *by)


def quantiles(name: str, by: str = "", title: str = "") -> tuple[Query, ...]:
    """Return queries for the median and the 99th percentile of a histogram over the selected engines.

    Args:
        name: name of the histogram in `EXPOSED` or `ROUTER`, such as ``kvferry_load_seconds``.
        by: name of the label whose values have a line each; empty for one line per query.
        title: text at the start of the legends, to tell histograms in one panel apart.
    """
    labels, legend = ((by,), f"{{{{{by}}}}} ") if by else ((), f"{title} ".lstrip())
    buckets = series(f"{name}_bucket", _scope(name))
    return tuple(
        Query(quantile(q, buckets, _RATE, *labels), f"{legend}{name_of_q}")
        for q, name_of_q in ((0.5, "median"), (0.99, "p99"))
    )
