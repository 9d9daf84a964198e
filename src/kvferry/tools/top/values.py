"""Values of metrics by labels, their sums, and quantiles of histograms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


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
    (5.0, 3.0, {('peer',): 3.0, ('tiers',): 2.0})
    """

    of: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **where: str) -> float:
        """Return the sum of a metric over all its series with the given labels; 0 without such series."""
        return sum(
            value for has, value in self.of.get(name, {}).items() if where.items() <= dict(has).items()
        )

    def by(self, name: str, *labels: str, **where: str) -> dict[tuple[str, ...], float]:
        """Group a metric's series by the values of labels, and return the sum of each group."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for has, value in self.of.get(name, {}).items():
            own = dict(has)
            if where.items() <= own.items():
                sums[tuple(own.get(label, "") for label in labels)] += value
        return dict(sorted(sums.items()))

    def buckets(self, name: str, **where: str) -> list[HistogramBucket]:
        """Return the cumulative buckets of a histogram, in the order of their upper ends."""
        return sorted(
            HistogramBucket(float(le), n) for (le,), n in self.by(f"{name}_bucket", "le", **where).items()
        )

    @classmethod
    def added(cls, several: Iterable[Values]) -> Values:
        """Return the sums of several engines' values, by metric name and labels."""
        sums: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        for values in several:
            for name, series in values.of.items():
                for labels, value in series.items():
                    sums[name][labels] += value
        return cls(sums)
