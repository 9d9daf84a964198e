"""Definitions of kvferry's metrics: names, kinds, labels and help texts. `docs/metrics.md` explains them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

PREFIX = "kvferry_"

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
        name: name without `PREFIX` and, for counters, without ``_total``.
        kind: counter, gauge or histogram.
        what: help text.
        labels: names of the metric's own labels, in the order in which their values are passed.
    """

    name: str
    kind: MetricKind
    what: str
    labels: tuple[str, ...] = ()


def _counter(name: str, what: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, what, labels)


def _gauge(name: str, what: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, what, labels)


def _histogram(name: str, what: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, what, labels)


_ALL = (
    _counter("queries", "Requests that a source was asked for.", "source"),
    _counter("hits", "Requests that a source brought something.", "source"),
    _counter("hit_tokens", "Tokens that a source brought requests.", "source", "tier"),
    _counter("misses", "Requests that a source brought nothing.", "source", "reason", "group"),
    _counter("recomputed_tokens", "Tokens computed although a source had bid them, and failed.", "source"),
    _gauge("pending_loads", "Loads under way.", "source"),
    _counter("loads", "Loads that have ended.", "source", "outcome"),
    _histogram("load_seconds", "Of a load, from the order to the last rank's report.", "source"),
    _counter("load_bytes", "Bytes that loads brought, over all ranks.", "source", "group", "strategy"),
    _gauge("late_blocks", "Blocks that loads past their deadline still hold."),
    _histogram("transfer_seconds", "Of a load from a peer, of the slowest rank.", "stage"),
    _counter("transfer_pages", "Prepared descriptors of loads from peers."),
    _counter("transfer_descriptors", "What was left of them, neighbours merged."),
    _gauge("tier_used_bytes", "In use by all that share the tier.", "tier"),
    _gauge("tier_capacity_bytes", "What the tier may use.", "tier"),
    _gauge("tier_owed_chunks", "Chunks that wait to be written to a tier.", "tier"),
    _counter("tier_fetched_chunks", "Chunks that loads took from a tier.", "tier"),
    _counter("tier_missed_chunks", "Chunks that a tier did not give as expected.", "tier", "reason"),
    _counter("tier_stored_chunks", "Chunks that a tier has taken.", "tier"),
    _counter("tier_stored_bytes", "Bytes of chunks that a tier has taken.", "tier"),
    _counter("tier_dropped_chunks", "Chunks that were not stored.", "tier", "reason"),
    _counter("tier_evicted_chunks", "Chunks that made room for others.", "tier"),
    _histogram("tier_fetch_seconds", "Of a chunk that was fetched from a tier.", "tier"),
    _histogram("tier_store_seconds", "Of a chunk that was stored to a tier.", "tier"),
    _gauge("leases", "Leases that hold blocks."),
    _counter("leases_granted", "Leases that were granted."),
    _counter("leases_ended", "Leases that have ended.", "outcome"),
)

_MULTI = (
    _counter("multi_queries", "Requests that a connector was asked for, per admission.", "connector"),
    _counter("multi_hits", "Of those, that it was chosen to load.", "connector"),
    _counter("multi_hit_tokens", "Tokens that it was to load for them.", "connector"),
    _counter("multi_passed_over", "Of those, that it had tokens of, and another was chosen.", "connector"),
    _counter("multi_misses", "Of those, that it had nothing of, or gave no answer in time.", "connector"),
    _counter("multi_loads", "Loads of it that have ended.", "connector", "outcome"),
    _gauge("multi_pending_loads", "Loads of it that are under way.", "connector"),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
"""Metrics of one connector, by name."""
MULTI: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _MULTI})
"""Metrics of the choice between several connectors, by name. `docs/multi.md` explains them."""
