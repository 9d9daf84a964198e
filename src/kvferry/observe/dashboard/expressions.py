"""Build PromQL expressions. Unknown metric names and labels raise an error."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.observe.exposed_names import COMMON, CONNECTOR, EXPOSED, ROUTER, SUFFIXES
from kvferry.observe.metrics import PREFIX, MetricKind

INSTANCE = "instance"
"""Label that Prometheus adds to scraped series: the engine's address."""
ENGINE = (INSTANCE, *COMMON)
"""Labels that together identify one engine."""


def series(name: str, scope: Mapping[str, str] | None = None, **where: str) -> str:
    """Return a PromQL selector of a metric's series, restricted by regular expressions for their labels.

    Args:
        name: name of a metric in `EXPOSED` (metrics that engines expose) or `ROUTER`; for a histogram,
            followed by one of `SUFFIXES`, such as ``_bucket``.
        scope: regular expression by label name, for restrictions that a dashboard applies to all metrics,
            such as the selected engines. None for no restriction.
        where: regular expression by label name, for further restrictions. If the value begins with ``!``, the
            rest of it is the regular expression, and the series that match it are excluded.

    Raises:
        ValueError: the metric is unknown, or has no label of one of the given names.

    >>> series("kvferry_loads_total", outcome="failed|expired")
    'kvferry_loads_total{outcome=~"failed|expired"}'
    """
    known = labels_of(name)
    patterns = {**(scope or {}), **where}
    if strange := patterns.keys() - known:
        raise ValueError(f"{name} has no label {', '.join(sorted(strange))}, only {', '.join(sorted(known))}")
    terms = [
        f'{label}!~"{pattern[1:]}"' if pattern.startswith("!") else f'{label}=~"{pattern}"'
        for label, pattern in patterns.items()
    ]
    return f"{name}{{{','.join(terms)}}}" if terms else name


def labels_of(name: str) -> frozenset[str]:
    """Return the names of all labels of a series, including labels that vLLM and Prometheus add.

    Args:
        name: name of a metric in `EXPOSED` (metrics that engines expose) or `ROUTER`; for a histogram,
            followed by one of `SUFFIXES`, such as ``_bucket``.

    Raises:
        ValueError: the metric is unknown.
    """
    base, suffix = next(
        ((name.removesuffix(each), each) for each in SUFFIXES if name.endswith(each)), (name, "")
    )
    metric = ROUTER.get(base) or EXPOSED.get(base)
    if metric is None or (metric.kind is MetricKind.HISTOGRAM) != bool(suffix):
        raise ValueError(f"{name} is no series of an engine or of the router")
    own = {*metric.labels, INSTANCE, "job"}
    if base in EXPOSED:
        own |= {*COMMON, *([CONNECTOR] if name.startswith(PREFIX) else [])}
    return frozenset(own | {"le"} if suffix == "_bucket" else own)


def total(what: str, *by: str) -> str:
    """Return a PromQL expression that sums another expression.

    Args:
        what: PromQL expression to sum.
        by: names of the labels to group by; none for one sum over all series.

    >>> total(per_second(series("kvferry_hits_total"), "5m"), "source")
    'sum by (source) (rate(kvferry_hits_total[5m]))'
    """
    return f"sum by ({', '.join(by)}) ({what})" if by else f"sum({what})"


def per_second(selector: str, over: str) -> str:
    """Return a PromQL expression for the rate per second of a counter.

    Args:
        selector: selector of the counter's series.
        over: time range over which the rate is averaged, such as ``5m``.
    """
    return f"rate({selector}[{over}])"


def increase(selector: str, over: str) -> str:
    """Return a PromQL expression for the increase of a counter.

    Args:
        selector: selector of the counter's series.
        over: time range up to now in which the increase is measured, such as ``30m``.
    """
    return f"increase({selector}[{over}])"


def quantile(q: float, selector: str, over: str, *by: str) -> str:
    """Return a PromQL expression for a quantile of a histogram.

    Args:
        q: quantile, from 0 to 1.
        selector: selector of the histogram's ``_bucket`` series.
        over: time range up to now whose observations count, such as ``5m``.
        by: names of the labels to group by; none for one quantile over all series.
    """
    return f"histogram_quantile({q:g}, {total(per_second(selector, over), *by, 'le')})"


def minus(what: str, part: str) -> str:
    """Return a PromQL expression that subtracts `part` from `what`, series by series.

    Args:
        what: PromQL expression to subtract from.
        part: PromQL expression to subtract. Each of its series is subtracted from the series of `what` with
            equal labels. A series of `what` without such a counterpart is unchanged.
    """
    return f"({what} - ({part} or 0 * {what}))"
