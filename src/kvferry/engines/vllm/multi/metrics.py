"""Prometheus metrics of the children, with a label ``connector``, and of the choice between children."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from kvferry.engines.vllm.compat.contract import KVConnectorPromMetrics
from kvferry.engines.vllm.multi.children import Child
from kvferry.engines.vllm.stats import create_metric, unregister
from kvferry.observe.exposed_names import CONNECTOR
from kvferry.observe.metrics import MULTI, PREFIX


class MultiMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of a `FerryMultiConnector` and its children, in the API server's process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, list[object]],
        children: Sequence[Child],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        unregister({f"{PREFIX}{name}" for name in MULTI})
        self._metrics = {
            name: create_metric(metric, metric_types, labelnames) for name, metric in MULTI.items()
        }
        names = [*labelnames, CONNECTOR]
        shared = _Shared()
        types = {kind: partial(shared.metric, make) for kind, make in metric_types.items()}
        self._children: dict[str, Any] = {}
        for child in children:
            values = {engine: [*those, child.name] for engine, those in per_engine_labelvalues.items()}
            metrics = child.cls.build_prom_metrics(child.config, types, names, values)
            if metrics is not None:
                self._children[child.name] = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an engine's stats, as `MultiStats.to_dict` returns them, to the Prometheus metrics."""
        engine = self.per_engine_labelvalues[engine_idx]
        for metric, child, outcome, n in transfer_stats_data["more"]:
            labels = (child, outcome) if outcome else (child,)
            self._metrics[f"multi_{metric}"].labels(*engine, *labels).inc(n)
        for child, n in transfer_stats_data["pending"].items():
            self._metrics["multi_pending_loads"].labels(*engine, child).set(n)
        for child, (_, data) in transfer_stats_data["children"].items():
            # A child may have stats without metrics.
            if child in self._children:
                self._children[child].observe(data, engine_idx)


class _Shared:
    """Factory of the children's Prometheus metrics, which creates one metric per name."""

    def __init__(self) -> None:
        # A name can be registered only once, so children share its metric. The label `connector` tells them
        # apart.
        self._made: dict[str, Any] = {}

    def metric(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the Prometheus metric with a given name; create it with `make` if it does not exist yet."""
        # Callers of prometheus_client pass the name by position or by keyword.
        name = str(kwargs["name"] if "name" in kwargs else args[0])
        if name not in self._made:
            self._made[name] = make(*args, **kwargs)
        metric = self._made[name]
        if isinstance(metric, MetricWrapperBase) and metric not in REGISTRY._collector_to_names:
            REGISTRY.register(metric)  # a second child of the same class has unregistered it
        return metric
