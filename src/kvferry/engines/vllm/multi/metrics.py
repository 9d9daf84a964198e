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
        """Add an engine's stats to the Prometheus metrics.

        Args:
            transfer_stats_data: stats of the engine, as `MultiStats.to_dict` returns them.
            engine_idx: index of the engine.
        """
        engine = self.per_engine_labelvalues[engine_idx]
        for metric, child, outcome, n in transfer_stats_data["more"]:
            labels = (child, outcome) if outcome else (child,)
            self._metrics[f"multi_{metric}"].labels(*engine, *labels).inc(n)
        for child, n in transfer_stats_data["pending"].items():
            self._metrics["multi_pending_loads"].labels(*engine, child).set(n)
        for child, (_, data) in transfer_stats_data["children"].items():
            if child in self._children:
                self._children[child].observe(data, engine_idx)


class _Shared:
    """Factory of the child connectors' Prometheus metrics, which creates one metric per name.

    A name can be registered with Prometheus only once, so children that use the same name share the metric.
    The label ``connector`` of the metric names the child.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def metric(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the Prometheus metric with a given name; create it with `make` if it does not exist yet.

        Args:
            make: class of the metric.
            args, kwargs: arguments of `make`. The first one, or ``name``, is the name of the metric.
        """
        name = str(kwargs["name"] if "name" in kwargs else args[0])
        if name not in self._made:
            self._made[name] = make(*args, **kwargs)
        metric = self._made[name]
        if isinstance(metric, MetricWrapperBase) and metric not in REGISTRY._collector_to_names:
            REGISTRY.register(metric)  # a second child of the same class has unregistered it
        return metric
