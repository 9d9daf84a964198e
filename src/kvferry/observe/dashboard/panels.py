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
        expression: in PromQL.
        legend: with labels in double braces.
    """

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart.

    Attributes:
        title: what it shows.
        about: how to read it.
        unit: Grafana's name of the unit.
        queries: PromQL queries.
        stacked: stack the values, because their sum means something.
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
        panels: under it.
        folded: shown when the heading is clicked on: not every engine has something to show there.
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
