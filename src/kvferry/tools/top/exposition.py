"""Parse a `/metrics` page in Prometheus's text format, and compute the rates between two readings.

https://prometheus.io/docs/instrumenting/exposition_formats/ describes the format.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from kvferry.common.errors import ProtocolError
from kvferry.observe import COMMON, EXPOSED, PREFIX, SUFFIXES, VLLM_PREFIX, series_names


class HistogramBucket(NamedTuple):
    """A cumulative histogram bucket: the number `n` of observations that are at most `end`."""

    end: float
    n: float


def quantile(q: float, buckets: Sequence[HistogramBucket]) -> float | None:
    """Estimate the q-quantile of a histogram; None if the histogram is empty.

    The rule is that of Prometheus's `histogram_quantile` (`bucketQuantile` in promql/quantile.go):
    observations are assumed to be spread evenly within their bucket, the lowest bucket begins at 0, and
    observations above the last finite end count as equal to that end.

    Args:
        buckets: cumulative buckets in order of their ends; the last end is infinite. All ends are above 0.

    >>> quantile(0.5, [HistogramBucket(1, 0), HistogramBucket(2, 4), HistogramBucket(math.inf, 4)])
    1.5
    """
    # Without the last bucket the number of observations is unknown.
    if len(buckets) < 2 or not math.isinf(buckets[-1].end) or not buckets[-1].n > 0:
        return None
    rank = q * buckets[-1].n
    at = next(number for number, bucket in enumerate(buckets) if bucket.n >= rank)
    # The last bucket has no end to estimate with.
    if at == len(buckets) - 1:
        return buckets[-2].end
    below = buckets[at - 1] if at else HistogramBucket(0.0, 0.0)
    share = (rank - below.n) / (buckets[at].n - below.n)
    return below.end + (buckets[at].end - below.end) * share


Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Values:
    """The values of metrics of one engine, or their sums over several engines, by name and then by labels.

    >>> hits = Values({"hits": {(("source", "peer"),): 3.0, (("source", "tiers"),): 2.0}})
    >>> hits.total("hits"), hits.total("hits", source="peer"), hits.by("hits", "source")
    (5.0, 3.0, {'peer': 3.0, 'tiers': 2.0})
    """

    of: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **where: str) -> float:
        """Return the sum of a metric over all its series with the given labels; 0 without such series."""
        return sum(self.by_all(name, **where).values())

    def by(self, name: str, label: str, **where: str) -> dict[str, float]:
        """Return the sums of a metric's series by the value of a label, in the order of the values."""
        return {value: n for (value,), n in self.by_all(name, label, **where).items()}

    def by_all(self, name: str, *labels: str, **where: str) -> dict[tuple[str, ...], float]:
        """Return the sums of a metric's series by the values of several labels, in their order."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for has, value in self.of.get(name, {}).items():
            own = dict(has)
            if where.items() <= own.items():
                sums[tuple(own.get(label, "") for label in labels)] += value
        return dict(sorted(sums.items()))

    def buckets(self, name: str, **where: str) -> list[HistogramBucket]:
        """Return the cumulative buckets of a histogram, in the order of their upper ends."""
        ends = self.by(f"{name}_bucket", "le", **where)
        return sorted(HistogramBucket(float(end), n) for end, n in ends.items())

    @classmethod
    def added(cls, several: Iterable[Values]) -> Values:
        sums: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        for values in several:
            for name, series in values.of.items():
                for labels, value in series.items():
                    sums[name][labels] += value
        return cls(sums)


_STARTED = "process_start_time_seconds"
_LABELS = {one: {*COMMON, *metric.labels} for name, metric in EXPOSED.items() for one in series_names(name)}
_WANTED = _LABELS.keys() | {_STARTED}
# Counters and the parts of histograms grow, so they have rates. Gauges have none.
_CUMULATIVE = ("_total", *SUFFIXES)
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True, slots=True)
class Scrape:
    """The content of one reading of `/metrics` from an API server, which may have several engines.

    Attributes:
        at: monotonic seconds of the reading.
        started: start of the server's process, in seconds since 1970; None if unknown.
        ferry: True if the page has kvferry's metrics.
        engines: values of the metrics of each engine, by the metrics' label ``engine``, such as ``0``.
    """

    at: float
    started: float | None
    model: str
    ferry: bool
    engines: Mapping[str, Values]


def parse_page(text: str, at: float) -> Scrape:
    """Return the metrics that `kvferry top` uses from a page read at `at` monotonic seconds.

    Raises:
        ProtocolError: the page is not in Prometheus's format, or has no such metric.
    """
    engines: defaultdict[str, defaultdict[str, dict[Labels, float]]] = defaultdict(lambda: defaultdict(dict))
    started, model = None, ""
    # Select the wanted lines first: a page has thousands of lines, and the parser is slow.
    wanted = [line for line in text.splitlines() if (name := _NAME.match(line)) and name[0] in _WANTED]
    try:
        for family in text_string_to_metric_families("\n".join(wanted)):
            for sample in family.samples:
                if sample.name == _STARTED:
                    started = sample.value
                    continue
                labels = _checked(sample.name, sample.labels)
                engine, model = labels.pop("engine"), labels.pop("model_name")
                engines[engine][sample.name][tuple(sorted(labels.items()))] = sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"/metrics is not in the format of Prometheus: {error}") from error
    if not engines:
        raise ProtocolError(
            f"/metrics has nothing of {VLLM_PREFIX} or {PREFIX} (an engine started with --disable-log-stats?)"
        )
    # A metric has its type there before it has a value.
    ferry = f"# TYPE {PREFIX}" in text
    return Scrape(at, started, model, ferry, {name: Values(of) for name, of in sorted(engines.items())})


def _checked(name: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of a series' labels. Raise ValueError if one is missing, or ``le`` is not a number."""
    if missing := _LABELS[name] - labels.keys():
        raise ValueError(f"{name} has no label {', '.join(sorted(missing))}")
    if name.endswith("_bucket"):
        float(labels.get("le", ""))
    return dict(labels)


@dataclass(frozen=True, slots=True)
class Window:
    """The values and the rates per second of one engine or of several. One reading has no rates."""

    now: Values
    rates: Values | None

    @classmethod
    def added(cls, windows: list[Window]) -> Window:
        """Return the sums of several engines' values and rates. Engines without rates add none."""
        rates = [window.rates for window in windows if window.rates is not None]
        return cls(Values.added(window.now for window in windows), Values.added(rates) if rates else None)


def window(before: Scrape | None, now: Scrape, engine: str) -> Window:
    """Return the metric values of one engine, and the rates of its counters between two readings.

    Args:
        engine: value of the label ``engine`` of the engine's metrics, such as ``0``.
    """
    values = now.engines[engine]
    if before is None or now.at <= before.at:
        return Window(values, None)
    # A counter starts at 0 in a new process. So it does if it is new, or has decreased.
    again = before.started is not None and now.started is not None and now.started != before.started
    base = {} if again or engine not in before.engines else before.engines[engine].of
    rates: dict[str, dict[Labels, float]] = {}
    for name, series in values.of.items():
        if name.endswith(_CUMULATIVE):
            was = base.get(name, {})
            grown = {labels: value - was.get(labels, 0.0) for labels, value in series.items()}
            rates[name] = {
                labels: (more if more >= 0 else series[labels]) / (now.at - before.at)
                for labels, more in grown.items()
            }
    return Window(values, Values(rates))
