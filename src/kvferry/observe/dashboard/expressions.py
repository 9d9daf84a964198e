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
