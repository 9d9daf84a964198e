"""Definitions of kvferry's metrics: names, kinds, labels and help texts. `docs/metrics.md` explains them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

PREFIX = "kvferry_"

# From a READ on one machine to a load that times out.
SECONDS = (
    0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the histograms' buckets, in seconds."""


class MetricKind(StrEnum):
    """The kind of a Prometheus metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a Prometheus metric.

    Attributes:
        name: name of the metric, without the prefix ``kvferry_`` and, for counters, without ``_total``.
        help_text: description of the metric, which `/metrics` shows.
        labels: names of the labels that kvferry sets, in the order in which their values are passed; without
            labels that vLLM and Prometheus add.
    """

    name: str
    kind: MetricKind
    help_text: str
    labels: tuple[str, ...] = ()


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, help_text, labels)


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, help_text, labels)


def _histogram(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, help_text, labels)


_ALL = (
    _counter("queries", "Requests for which a source was asked for KV.", "source"),
    _counter("hits", "Requests for which a source loaded tokens.", "source"),
    _counter("hit_tokens", "Tokens that a source loaded, by the tier they came from.", "source", "tier"),
    _counter("misses", "Requests for which a source loaded nothing.", "source", "reason", "group"),
    _counter("tickets", "Requests that came with a ticket, by what became of it.", "outcome"),
    _counter("recomputed_tokens", "Tokens that were computed because their load failed.", "source"),
    _gauge("pending_loads", "Loads in flight.", "source"),
    _counter("loads", "Loads that have ended.", "source", "outcome"),
    _histogram("load_seconds", "Time of a successful load, until the slowest rank has reported.", "source"),
    _counter("load_bytes", "Bytes loaded, summed over all ranks.", "source", "group", "strategy"),
    _gauge("late_blocks", "Blocks that loads still hold after their deadline or their request has ended."),
    _histogram("transfer_seconds", "Time of a load from a peer, by stage, on the slowest rank.", "stage"),
    _gauge("read_bytes_per_second", "Measured speed of READs from the peer of the last load.", "strategy"),
    _counter("transfer_pages", "Pages loaded from peers."),
    _counter("transfer_descriptors", "Contiguous reads (descriptors) that loaded these pages from peers."),
    _gauge("tier_used_bytes", "Bytes in use in a tier, by all engines that share it.", "tier"),
    _gauge("tier_capacity_bytes", "Bytes that a tier may use.", "tier"),
    _gauge("tier_owed_chunks", "Chunks that are not yet written to a tier.", "tier"),
    _counter("tier_fetched_chunks", "Chunks that loads read from a tier.", "tier"),
    _counter(
        "tier_missed_chunks", "Chunks that a load expected in a tier but could not read.", "tier", "reason"
    ),
    _counter("tier_stored_chunks", "Chunks stored to a tier.", "tier"),
    _counter("tier_stored_bytes", "Bytes of chunks stored to a tier.", "tier"),
    _counter("tier_dropped_chunks", "Chunks that were not stored to a tier.", "tier", "reason"),
    _counter("tier_evicted_chunks", "Chunks evicted from a tier to make room.", "tier"),
    _histogram("tier_fetch_seconds", "Time to fetch one chunk from a tier.", "tier"),
    _histogram("tier_store_seconds", "Time to store one chunk to a tier.", "tier"),
    _gauge("first_snapshot_tokens", "First position of a snapshot for shared prefixes; 0 for none."),
    _gauge("snapshot_bytes", "Bytes of a snapshot of recurrent state in the tiers."),
    _gauge("leases", "Leases that keep blocks for other engines to read."),
    _counter("leases_granted", "Leases granted."),
    _counter("leases_ended", "Leases that have ended.", "outcome"),
)

# The names begin with `multi_`, because the children of a FerryMultiConnector have the others.
_MULTI = (
    _counter("multi_queries", "Requests for which a connector was asked, once per admission.", "connector"),
    _counter("multi_hits", "Requests that a connector was chosen to load.", "connector"),
    _counter("multi_hit_tokens", "Tokens that a connector was chosen to load.", "connector"),
    _counter(
        "multi_passed_over", "Requests for which a connector had tokens but was not chosen.", "connector"
    ),
    _counter(
        "multi_misses",
        "Requests for which a connector had no tokens, or did not answer in time.",
        "connector",
    ),
    _counter("multi_loads", "Loads by a connector that have ended.", "connector", "outcome"),
    _gauge("multi_pending_loads", "Loads by a connector that are in flight.", "connector"),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Metrics of one connector, by name."""
MULTI: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _MULTI})
"""Metrics of the choice between several connectors, by name. `docs/multi.md` explains them."""
