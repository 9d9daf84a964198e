"""Build a dashboard of panels and rows, and the PromQL of its queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvferry.observe import COMMON, CONNECTOR, EXPOSED, PREFIX, ROUTER, ROUTER_PREFIX, SUFFIXES, MetricKind

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
    known = _labels_of(name)
    patterns = {**(scope or {}), **where}
    # Prometheus would answer such a query with nothing.
    if strange := patterns.keys() - known:
        raise ValueError(f"{name} has no label {', '.join(sorted(strange))}, only {', '.join(sorted(known))}")
    terms = [
        f'{label}!~"{pattern[1:]}"' if pattern.startswith("!") else f'{label}=~"{pattern}"'
        for label, pattern in patterns.items()
    ]
    return f"{name}{{{','.join(terms)}}}" if terms else name


def _labels_of(name: str) -> frozenset[str]:
    """Return all labels of a series, also vLLM's and Prometheus's. Raise ValueError for an unknown metric."""
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


_SCOPE = {"instance": "$instance", "model_name": "$model", "engine": "$engine"}
# Grafana's own, which is long enough for the scrape interval.
_RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL query and the legend of its lines in a chart, with names of labels in double braces."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart. `unit` is Grafana's name of it. Values are `stacked` if their sum is meaningful."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A row of the dashboard: a heading with panels below it. A folded row is collapsed at first."""

    title: str
    panels: tuple[Panel, ...]
    folded: bool


def panel(title: str, description: str, unit: str, *queries: Query, stacked: bool = False) -> Panel:
    """Return a `Panel` with these queries."""
    return Panel(title, description, unit, queries, stacked)


def row(title: str, *panels: Panel, folded: bool = False) -> PanelRow:
    """Return a `PanelRow` with these panels."""
    return PanelRow(title, panels, folded)


def _selected(name: str, **where: str) -> str:
    # The router is no engine, so it has none of the labels of the dashboard's variables.
    return series(name, None if name.startswith(ROUTER_PREFIX) else _SCOPE, **where)


def _legend(by: Iterable[str], also: str) -> str:
    return " ".join([*(f"{{{{{label}}}}}" for label in by), also]).strip()


def level(name: str, *by: str) -> str:
    """Return a PromQL expression that sums a gauge over the engines selected in the dashboard, by label."""
    return total(_selected(name), *by)


def rate(name: str, *by: str, **where: str) -> str:
    """Return a PromQL expression for a counter's rate per second over the selected engines, by label."""
    return total(per_second(_selected(name, **where), _RATE), *by)


def levels(name: str, *by: str, also: str = "") -> Query:
    """Return the query of a `level`. Its legend has the labels, then `also`."""
    return Query(level(name, *by), _legend(by, also))


def rates(name: str, *by: str, also: str = "", **where: str) -> Query:
    """Return the query of a `rate`. Its legend has the labels, then `also`."""
    return Query(rate(name, *by, **where), _legend(by, also))


def quantiles(name: str, *by: str, also: str = "") -> tuple[Query, Query]:
    """Return queries for the median and the 99th percentile of a histogram over the selected engines.

    `also` stands in the legends before the name of the quantile.
    """
    buckets = _selected(f"{name}_bucket")
    median = Query(quantile(0.5, buckets, _RATE, *by), _legend(by, f"{also}median"))
    return median, Query(quantile(0.99, buckets, _RATE, *by), _legend(by, f"{also}p99"))
