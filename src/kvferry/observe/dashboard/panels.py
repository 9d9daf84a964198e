"""Building blocks of a dashboard: panels, rows and their queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.observe.metrics import (
    COMMON,
    CONNECTOR,
    EXPOSED,
    PREFIX,
    ROUTER,
    ROUTER_PREFIX,
    SUFFIXES,
    MetricKind,
)

INSTANCE = "instance"
"""Label that Prometheus adds to scraped series: the engine's address."""
ENGINE = (INSTANCE, *COMMON)
"""Labels that together identify one engine."""


def series(name: str, scope: Mapping[str, str] | None = None, **where: str) -> str:
    """Return a PromQL selector of a metric's series, restricted by regular expressions for their labels.

    Args:
        name: name of a metric in `EXPOSED` or `ROUTER`; for a histogram, followed by one of `SUFFIXES`.
        scope: regular expression by label name, for restrictions that a dashboard applies to all metrics.
        where: regular expression by label name. A value that begins with ``!`` excludes what the rest
            matches.

    Raises:
        ValueError: the metric is unknown, or has no label of one of the given names.

    >>> series("kvferry_loads_total", outcome="failed|expired")
    'kvferry_loads_total{outcome=~"failed|expired"}'
    """
    known = labels_of(name)
    patterns = {**(scope or {}), **where}
    # Prometheus would answer such a query with nothing.
    if strange := patterns.keys() - known:
        raise ValueError(f"{name} has no label {', '.join(sorted(strange))}, only {', '.join(sorted(known))}")
    terms = [
        f'{label}!~"{pattern[1:]}"' if pattern.startswith("!") else f'{label}=~"{pattern}"'
        for label, pattern in patterns.items()
    ]
    return f"{name}{{{','.join(terms)}}}" if terms else name


def labels_of(name: str) -> frozenset[str]:
    """Return the names of all labels of a series, including labels that vLLM and Prometheus add.

    Raises:
        ValueError: the metric is unknown.
    """
    # A metric may have a name that ends like a suffix, so the kind is checked below.
    base, suffix = next(
        ((name.removesuffix(each), each) for each in SUFFIXES if name.endswith(each)), (name, "")
    )
    metric = ROUTER.get(base) or EXPOSED.get(base)
    if metric is None or (metric.kind is MetricKind.HISTOGRAM) != bool(suffix):
        raise ValueError(f"{name} is no series of an engine or of the router")
    own = {*metric.labels, INSTANCE, "job"}
    if base in EXPOSED:
        # Only kvferry's metrics can be those of one of several connectors.
        own |= {*COMMON, *([CONNECTOR] if name.startswith(PREFIX) else [])}
    return frozenset(own | {"le"} if suffix == "_bucket" else own)


def total(what: str, *by: str) -> str:
    """Return a PromQL expression that sums another one, by label or over all series.

    >>> total(per_second(series("kvferry_hits_total"), "5m"), "source")
    'sum by (source) (rate(kvferry_hits_total[5m]))'
    """
    return f"sum by ({', '.join(by)}) ({what})" if by else f"sum({what})"


def per_second(selector: str, over: str) -> str:
    """Return a PromQL expression for the rate per second of a counter over a time such as ``5m``."""
    return f"rate({selector}[{over}])"


def increase(selector: str, over: str) -> str:
    """Return a PromQL expression for the increase of a counter in the last time such as ``30m``."""
    return f"increase({selector}[{over}])"


def quantile(q: float, selector: str, over: str, *by: str) -> str:
    """Return a PromQL expression for a quantile from a histogram's ``_bucket`` series, by label."""
    return f"histogram_quantile({q:g}, {total(per_second(selector, over), *by, 'le')})"


def minus(what: str, part: str) -> str:
    """Return a PromQL expression that subtracts `part` from the series of `what` with equal labels."""
    # Without the zero, Prometheus drops series of `what` that have no counterpart.
    return f"({what} - ({part} or 0 * {what}))"


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
