"""Building blocks of a dashboard: panels, rows and their queries."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.observe.dashboard.expressions import per_second, quantile, series, total

SCOPE = {"instance": "$instance", "model_name": "$model", "engine": "$engine"}
"""The dashboard's variables."""
_RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression with the legend of its lines.

    Attributes:
        expression: PromQL.
        legend: legend with labels in double braces.
    """

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart.

    Attributes:
        title: title of the panel.
        about: explanation of the panel.
        unit: Grafana's name of the unit.
        queries: PromQL queries.
        stacked: whether to stack the values, if their sum is meaningful.
    """

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under one heading.

    Attributes:
        title: the heading.
        panels: panels below it.
        folded: whether the row is collapsed at first, because many engines have no data for it.
    """

    title: str
    panels: tuple[Panel, ...]
    folded: bool = False


def level(name: str, *by: str, **where: str) -> str:
    """Return the sum of a gauge by labels."""
    return total(series(name, SCOPE, **where), *by)


def rate(name: str, *by: str, **where: str) -> str:
    """Return the rate per second of a counter, summed by labels."""
    return total(per_second(series(name, SCOPE, **where), _RATE), *by)


def quantiles(name: str, by: str = "") -> tuple[Query, ...]:
    """Return median and 99th percentile of a histogram by a label."""
    labels, legend = ((by,), f"{{{{{by}}}}} ") if by else ((), "")
    buckets = series(f"{name}_bucket", SCOPE)
    return tuple(
        Query(quantile(q, buckets, _RATE, *labels), f"{legend}{said}")
        for q, said in ((0.5, "median"), (0.99, "p99"))
    )
