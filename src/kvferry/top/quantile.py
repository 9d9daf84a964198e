"""Quantiles of a histogram, as Prometheus estimates them.

The rule is that of `histogram_quantile` (https://prometheus.io/docs/prometheus/latest/querying/functions/,
`bucketQuantile` in promql/quantile.go): values are assumed to be uniform within their bucket, the lowest
bucket begins at 0, and values beyond the last finite end count as equal to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class HistogramBucket(NamedTuple):
    """A cumulative histogram bucket: the number `n` of values up to `end`."""

    end: float
    n: float


def quantile(q: float, buckets: Sequence[HistogramBucket]) -> float | None:
    """Estimate the q-quantile, 0 < q <= 1; None for an empty histogram.

    Args:
        buckets: cumulative buckets in order of their ends; the last end is infinite. All ends are above 0.

    >>> quantile(0.5, [HistogramBucket(1, 0), HistogramBucket(2, 4), HistogramBucket(math.inf, 4)])
    1.5
    """
    if len(buckets) < 2 or not math.isinf(buckets[-1].end) or not buckets[-1].n > 0:
        return None
    rank = q * buckets[-1].n
    at = next(number for number, bucket in enumerate(buckets) if bucket.n >= rank)
    if at == len(buckets) - 1:
        return buckets[-2].end
    below = buckets[at - 1] if at else HistogramBucket(0.0, 0.0)
    share = (rank - below.n) / (buckets[at].n - below.n)
    return below.end + (buckets[at].end - below.end) * share
