"""Messages of a `FerryMultiConnector`: those of all children, and stats of the choice between them.

vLLM sends stats between processes as plain values (numbers, strings, lists and dicts). In the other process,
it restores them with the connector's class, without the engine's configuration. So the stats of each child
carry the module and name of the connector class that restores them.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from kvferry.engines.vllm.compat.connectors import (
    KVConnectorHandshakeMetadata,
    KVConnectorKVEvents,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
)
from kvferry.engines.vllm.messages import create_metrics
from kvferry.engines.vllm.multi.children import Child
from kvferry.engines.vllm.multi.completions import LateLoad
from kvferry.observe.metrics import CONNECTOR, MULTI

ClassPath = tuple[str, str]
"""(module, qualified name) of a connector's class."""

Count = tuple[str, str, str]
"""Labels of a counter: (metric, name of the child, outcome). The outcome is empty for metrics without one."""


@dataclass(slots=True)
class Counts:
    """Counts of how often each child is chosen, and of how its loads end."""

    increments: Counter[Count] = field(default_factory=Counter)  # since the last call of `take`
    pending: Counter[str] = field(default_factory=Counter)  # loads in flight, by child; `take` keeps them

    def admitted(self, answers: Iterable[tuple[str, int | None]], loader: str | None, tokens: int) -> None:
        """Count the admission of a request for each child, as a hit, a miss or a passed-over offer.

        `answers` has (name, number of tokens offered) of each child; None if it was still looking for KV.
        """
        for name, answer in answers:
            self.increments["queries", name, ""] += 1
            if name == loader:
                self.increments["hits", name, ""] += 1
                self.increments["hit_tokens", name, ""] += tokens
            elif answer:
                self.increments["passed_over", name, ""] += 1
            else:
                self.increments["misses", name, ""] += 1

    def ended(self, name: str, *, succeeded: bool, late: bool = False) -> None:
        """Count the end of a child's load. The request has gone on without a late one."""
        self.increments["loads", name, "expired" if late else "ready" if succeeded else "failed"] += 1

    def take(self) -> Counter[Count]:
        """Return the increments of all counters since the last call, and clear these increments."""
        taken, self.increments = self.increments, Counter()
        return taken


class MultiStats(KVConnectorStats):
    """Stats of a `FerryMultiConnector` and its children, from which the engine's metrics are updated.

    Attributes:
        data: ``children`` maps a child's name to (path of the connector's class, stats of the child).
            ``more`` has a list [metric, name of the child, outcome, increment] per counter. ``pending`` maps
            a child's name to its asynchronous loads in flight, if ``more`` has any counter.
    """

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(data) if data else {})
        if not self.data:
            self.reset()

    @classmethod
    def read(cls, data: Mapping[str, Any] | None) -> MultiStats:
        """Restore stats from the result of `to_dict`."""
        if not data:
            return cls()
        children = {}
        for name, (path, stats) in data["children"].items():
            # Stats that have not left the process hold objects.
            whole = stats if isinstance(stats, KVConnectorStats) else _restore(tuple(path), stats)
            if whole is not None:
                children[name] = (tuple(path), whole)
        return cls({**data, "children": children, "more": [*data["more"]], "pending": {**data["pending"]}})

    @classmethod
    def of(
        cls, children: Mapping[str, tuple[ClassPath, KVConnectorStats]], counts: Counts | None
    ) -> MultiStats:
        """Combine the stats of the children with the counts of choices, whose increments are cleared."""
        more = counts.take() if counts is not None else {}
        pending = dict(counts.pending) if counts is not None and more else {}
        return cls(
            {"children": dict(children), "more": [[*key, n] for key, n in more.items()], "pending": pending}
        )

    def reset(self) -> None:
        self.data = {"children": {}, "more": [], "pending": {}}

    def to_dict(self) -> dict[str, Any]:
        children = {
            name: [list(path), stats.to_dict()] for name, (path, stats) in self.data["children"].items()
        }
        return {**self.data, "children": children}

    def aggregate(self, other: KVConnectorStats) -> MultiStats:
        ours = self.data["children"]
        for name, (path, stats) in other.data["children"].items():
            ours[name] = (path, ours[name][1].aggregate(stats) if name in ours else stats)
        self.data["more"] += other.data["more"]
        self.data["pending"] |= other.data["pending"]
        return self

    def reduce(self) -> dict[str, int | float]:
        said: dict[str, int | float] = {}
        for metric, name, outcome, n in self.data["more"]:
            key = " ".join(filter(None, (name, outcome, metric.replace("_", " "))))
            said[key] = said.get(key, 0) + n
        for name, (_, stats) in self.data["children"].items():
            if not stats.is_empty():
                said |= {f"{name} {key}": value for key, value in stats.reduce().items()}
        return said

    def is_empty(self) -> bool:
        return not self.data["more"] and all(stats.is_empty() for _, stats in self.data["children"].values())


def _restore(path: ClassPath, data: Any) -> KVConnectorStats | None:
    """Restore the stats of a child from plain values; None if the connector's class has none."""
    module, name = path
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found.build_kv_connector_stats(data)


@dataclass(slots=True)
class MultiMeta(KVConnectorMetadata):
    """Message from the scheduler half of a `FerryMultiConnector` to its worker halves, once per step.

    Attributes:
        loads: index of the child that runs an asynchronous load that starts, by id of the request. Workers
            ignore the other children's reports that the load has ended.
        holders: indices of the children that keep blocks, by id of an ended request.
        given_up: loads that were not ended in time, by id of the request.
    """

    children: tuple[KVConnectorMetadata, ...]
    loads: dict[str, int] = field(default_factory=dict)
    holders: dict[str, frozenset[int]] = field(default_factory=dict)
    given_up: dict[str, LateLoad] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MultiWorkerMeta(KVConnectorWorkerMetadata):
    """Message from a worker half of a `FerryMultiConnector` to its scheduler half, once per step."""

    children: tuple[KVConnectorWorkerMetadata | None, ...]
    # Number of workers on which a load that was given up has ended, by the name of the load.
    ended: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerMeta:
        assert isinstance(other, MultiWorkerMeta)
        return MultiWorkerMeta(
            tuple(
                (mine.aggregate(theirs) if theirs is not None else mine) if mine is not None else theirs
                for mine, theirs in zip(self.children, other.children, strict=True)
            ),
            dict(Counter(self.ended) + Counter(other.ended)),
        )


@dataclass(frozen=True, slots=True)
class MultiHandshake(KVConnectorHandshakeMetadata):
    """Handshakes that a worker sends to the scheduler for all children; None for a child without one."""

    children: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiEvents(KVConnectorKVEvents):
    """KV cache events of a worker's children, which vLLM merges with those of the other workers."""

    def __init__(self, children: tuple[KVConnectorKVEvents | None, ...]) -> None:
        self.children = list(children)

    def get_all_events(self) -> list[Any]:
        """Return (index of the child, its KVConnectorKVEvents) for every child that has events."""
        return [(place, of) for place, of in enumerate(self.children) if of is not None]

    def add_events(self, events: list[Any]) -> None:
        """Add the result of `get_all_events` of another worker."""
        for place, theirs in events:
            mine = self.children[place]
            if mine is None:
                self.children[place] = theirs
            else:
                mine.add_events(theirs.get_all_events())
                # vLLM calls `increment_workers` for each other worker. But a worker may have events of only
                # some children in a step, so they are counted for each child.
                mine.increment_workers(theirs.get_number_of_workers())

    def aggregate(self) -> MultiEvents:
        return MultiEvents(tuple(of.aggregate() if of is not None else None for of in self.children))

    def increment_workers(self, count: int = 1) -> None:
        """Do nothing: `add_events` counts the workers of each child."""

    def get_number_of_workers(self) -> int:
        return max((of.get_number_of_workers() for of in self.children if of is not None), default=0)

    def clear_events(self) -> None:
        for of in self.children:
            if of is not None:
                of.clear_events()


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
        self._metrics = create_metrics(MULTI, metric_types, labelnames)
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
