"""Functions that build PromQL. Unknown metric names and labels are refused."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.observe.exposed_names import COMMON, CONNECTOR, EXPOSED, SUFFIXES
from kvferry.observe.metrics import PREFIX, MetricKind

INSTANCE = "instance"
"""The label that Prometheus adds to scraped series: the engine's address."""
ENGINE = (INSTANCE, *COMMON)
"""Labels that together identify one engine."""


def series(name: str, scope: Mapping[str, str] | None = None, **where: str) -> str:
    """Return a selector of a series.

    Args:
        name: a name in `EXPOSED`; for a histogram, with one of its suffixes.
        scope: patterns of the labels that all metrics have.
        where: patterns of the metric's own labels; a pattern that begins with ``!`` must not match.

    Raises:
        ValueError: the metric is unknown, or it has no such label.

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
    """Return the labels of a series, as Prometheus stores them.

    Raises:
        ValueError: the metric is unknown.
    """
    base, suffix = next(
        ((name.removesuffix(each), each) for each in SUFFIXES if name.endswith(each)), (name, "")
    )
    metric = EXPOSED.get(base)
    if metric is None or (metric.kind is MetricKind.HISTOGRAM) != bool(suffix):
        raise ValueError(f"{name} is no series of an engine")
    own = {*metric.labels, *ENGINE, "job", *([CONNECTOR] if name.startswith(PREFIX) else [])}
    return frozenset(own | {"le"} if suffix == "_bucket" else own)


def total(what: str, *by: str) -> str:
    """Return a sum by labels.

    >>> total(per_second(series("kvferry_hits_total"), "5m"), "source")
    'sum by (source) (rate(kvferry_hits_total[5m]))'
    """
    return f"sum by ({', '.join(by)}) ({what})" if by else f"sum({what})"


def per_second(selector: str, over: str) -> str:
    """Return the rate of a counter."""
    return f"rate({selector}[{over}])"


def gained(selector: str, over: str) -> str:
    """Return the increase of a counter over a time range."""
    return f"increase({selector}[{over}])"


def quantile(q: float, selector: str, over: str, *by: str) -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({q:g}, {total(per_second(selector, over), *by, 'le')})"


def less(what: str, part: str) -> str:
    """Return `what` minus `part`, which may have no series."""
    return f"({what} - ({part} or 0 * {what}))"
