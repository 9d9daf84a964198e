"""Messages between the connector's two halves, and its stats and metrics, as subclasses of vLLM's classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.messages import StepOrders, StepReports, WorkerInfo
from kvferry.engines.vllm.built import Built
from kvferry.engines.vllm.compat.connectors import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
)
from kvferry.observe.metrics import METRICS, PREFIX, SECONDS, Metric, MetricKind, MetricsDelta


@dataclass(frozen=True, slots=True)
class WorkerCard(KVConnectorHandshakeMetadata):
    """Handshake with which a worker describes itself and its model to the scheduler half."""

    info: WorkerInfo
    settings: ConnectorConfig  # without this machine's address; they tell several connectors apart
    built: Built = field(default_factory=Built)


@dataclass(slots=True)
class SchedulerMeta(KVConnectorMetadata):
    """Message from the scheduler half of an engine to its worker halves, once per step."""

    engine_id: str
    orders: StepOrders = field(default_factory=StepOrders)


@dataclass(slots=True)
class WorkerMeta(KVConnectorWorkerMetadata):
    """Message from the worker halves to the scheduler half, once per step."""

    reports: StepReports = field(default_factory=StepReports)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMeta)
        # vLLM merges the messages of all workers into that of the first.
        self.reports.add(other.reports)
        return self

    def __bool__(self) -> bool:
        return bool(self.reports)


class FerryStats(KVConnectorStats):
    """Metric counts of the connector since its last report, as plain values (`MetricsDelta.plain`)."""

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(data) if data else MetricsDelta().plain())

    def reset(self) -> None:
        self.data = MetricsDelta().plain()

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        both = MetricsDelta.read(self.data)
        both.add(MetricsDelta.read(other.data))
        self.data = both.plain()
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a summary of the counts for the engine's log."""
        counted = MetricsDelta.read(self.data)
        loads: dict[str, int | float] = {}
        sums = dict.fromkeys(("load_bytes", "hit_tokens"), 0)
        for (name, labels), n in counted.counters.items():
            if name == "loads":
                loads[f"{' '.join(labels)} loads"] = n
            elif name in sums:
                sums[name] += n
        seconds = [s for (name, _), seen in counted.samples.items() if name == "load_seconds" for s in seen]
        return {
            **loads,
            "MiB": round(sums["load_bytes"] / 2**20, 3),
            "hit tokens": sums["hit_tokens"],
            "median ms": round(median(seconds) * 1e3, 3) if seconds else 0.0,
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


class FerryMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the connector, in the process of vLLM's API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = create_metrics(METRICS, metric_types, labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an engine's counts, as `MetricsDelta.plain` returns them, to the Prometheus metrics."""
        counted, engine = MetricsDelta.read(transfer_stats_data), self.per_engine_labelvalues[engine_idx]
        for (name, labels), n in counted.counters.items():
            self._metrics[name].labels(*engine, *labels).inc(n)
        for (name, labels), value in counted.gauges.items():
            self._metrics[name].labels(*engine, *labels).set(value)
        for (name, labels), seen in counted.samples.items():
            of = self._metrics[name].labels(*engine, *labels)
            for each in seen:
                of.observe(each)


def create_metrics(
    metrics: Mapping[str, Metric], types: Mapping[type, Any], labels: Sequence[str]
) -> dict[str, Any]:
    """Create Prometheus metrics from their definitions by name.

    Args:
        types: class to use in place of each `prometheus_client` class (`Counter`, `Gauge`, `Histogram`).
        labels: names of the labels that identify an engine, before a metric's own labels.
    """
    # An engine that ran earlier in this process may have registered them, and a name can be registered once.
    names = {f"{PREFIX}{name}" for name in metrics}
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "") in names:
            REGISTRY.unregister(collector)
    return {name: _create_metric(metric, types, labels) for name, metric in metrics.items()}


def _create_metric(metric: Metric, types: Mapping[type, Any], labels: Sequence[str]) -> Any:
    of: dict[str, Any] = {
        "name": f"{PREFIX}{metric.name}",
        "documentation": metric.help_text,
        "labelnames": [*labels, *metric.labels],
    }
    if metric.kind is MetricKind.COUNTER:
        return types[Counter](**of)
    if metric.kind is MetricKind.HISTOGRAM:
        return types[Histogram](**of, buckets=SECONDS)
    # An engine may report its steps to different API servers, so the most recent value is the right one.
    return types[Gauge](**of, multiprocess_mode="mostrecent")
