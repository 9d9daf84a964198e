"""What loads came to, on the engine's own /metrics.

The scheduler half counts a load once, when every worker has reported it; the engine carries the counts to its
API server (`TransferStats`), which keeps them as Prometheus metrics (`TransferMetrics`). `docs/metrics.md`
lists those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from prometheus_client import REGISTRY, Counter, Histogram

from kvferry.engines.vllm.compat import KVConnectorPromMetrics, KVConnectorStats
from kvferry.engines.vllm.meta import Report
from kvferry.engines.vllm.tier_stats import METRICS as TIER_METRICS, PREFIX as TIERS

PREFIX = "kvferry_transfer"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends of the histogram's buckets."""


class TransferStats(KVConnectorStats):
    """Loads that ended since the last look.

    Attributes:
        data: plain values, by name: ``loads`` by outcome; ``bytes`` of loads that are ready by
            ``[group, strategy]``; ``descriptors`` and ``pages`` of those; ``seconds`` of each; and ``tiers``,
            what was counted there: (metric, labels, how much more).
    """

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(data) if data else {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.data = {"loads": {}, "bytes": [], "descriptors": 0, "pages": 0, "seconds": [], "tiers": []}

    def note(self, report: Report, labels: Sequence[str]) -> None:
        """Count a load that all workers have reported.

        Args:
            report: theirs, as one.
            labels: name per group.
        """
        data, outcome = self.data, report.outcome
        data["loads"][outcome] = data["loads"].get(outcome, 0) + 1
        if report.failure is not None:
            return
        for label, size, strategy in zip(
            labels, report.bytes_by_group, report.strategy_by_group, strict=False
        ):
            if size:
                data["bytes"].append([label, strategy, size])
        data["descriptors"] += report.descriptors
        data["pages"] += report.pages
        data["seconds"].append(report.transfer_seconds)

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add another's counts to these."""
        for outcome, count in other.data["loads"].items():
            self.data["loads"][outcome] = self.data["loads"].get(outcome, 0) + count
        for name in ("bytes", "descriptors", "pages", "seconds", "tiers"):
            self.data[name] += other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log."""
        seconds = self.data["seconds"]
        return {
            **{f"{outcome} loads": count for outcome, count in self.data["loads"].items()},
            "MiB": round(sum(size for _, _, size in self.data["bytes"]) / 2**20, 3),
            "tokens from tiers": sum(n for name, _, n in self.data["tiers"] if name == "hit_tokens"),
            "median ms": round(median(seconds) * 1e3, 3) if seconds else 0.0,
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data["loads"] and not self.data["tiers"]


class TransferMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, of the API server's process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister()
        counter, histogram = metric_types[Counter], metric_types[Histogram]

        def counted(name: str, what: str, *labels: str) -> Any:
            return counter(name=f"{PREFIX}_{name}", documentation=what, labelnames=[*labelnames, *labels])

        self._loads = counted("loads", "Loads from peers that have ended.", "outcome")
        self._bytes = counted("bytes", "Bytes loaded from peers.", "group", "strategy")
        self._pages = counted("pages", "Prepared descriptors used, before neighbours are merged.")
        self._descriptors = counted("descriptors", "Descriptors after neighbours are merged.")
        self._seconds = histogram(
            name=f"{PREFIX}_seconds",
            documentation="From the first read posted to the last byte here, of the slowest worker.",
            labelnames=labelnames,
            buckets=SECONDS,
        )

        self._tiers = {
            name: counter(name=f"{TIERS}_{name}", documentation=what, labelnames=[*labelnames, *labels])
            for name, (what, labels) in TIER_METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine has sent."""
        data, engine = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        for outcome, count in data["loads"].items():
            self._loads.labels(*engine, outcome).inc(count)
        for group, strategy, size in data["bytes"]:
            self._bytes.labels(*engine, group, strategy).inc(size)
        self._pages.labels(*engine).inc(data["pages"])
        self._descriptors.labels(*engine).inc(data["descriptors"])
        for seconds in data["seconds"]:
            self._seconds.labels(*engine).observe(seconds)
        for name, labels, more in data["tiers"]:
            self._tiers[name].labels(*engine, *labels).inc(more)


def _unregister() -> None:
    """Forget the metrics of an engine that this process had before, as vLLM does with its own."""
    for collector in list(_ours()):
        REGISTRY.unregister(collector)


def _ours() -> Iterator[Any]:
    for collector in REGISTRY._collector_to_names:
        if getattr(collector, "_name", "").startswith((PREFIX, TIERS)):
            yield collector
