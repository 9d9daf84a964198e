"""Stats of the children and of the choice between them, on their way to the engine's /metrics.

vLLM sends stats between processes as plain values (numbers, strings, lists and dicts). In the other process,
it restores them with the connector's class, without the engine's configuration. So the stats of each child
carry the module and name of the connector class that restores them.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from kvferry.engines.vllm.compat.contract import KVConnectorStats
from kvferry.engines.vllm.multi.counts import Counts

logger = logging.getLogger(__name__)

ClassPath = tuple[str, str]
"""(module, qualified name) of a connector's class."""


def path_of(cls: type) -> ClassPath:
    """Return the module and the qualified name of a class."""
    return cls.__module__, cls.__qualname__


class MultiStats(KVConnectorStats):
    """Stats of a `FerryMultiConnector` and its children, from which the engine's metrics are updated.

    A worker has stats of the children only. The scheduler also counts how children are chosen.

    Attributes:
        data: dictionary with three entries. ``children`` maps a child connector's name to (module and name of
            the connector's class, stats of the child). ``more`` has a list [metric, name of the child,
            outcome, increment] per counter. ``pending`` maps a child's name to its number of asynchronous
            loads in flight; it is empty if ``more`` is empty.
    """

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(data) if data else {})
        if not self.data:
            self.reset()

    @classmethod
    def read(cls, data: Mapping[str, Any] | None) -> MultiStats:
        """Restore stats from the plain values in which vLLM sends them between processes.

        Args:
            data: plain values, as `to_dict` returns them; None or empty for no stats.
        """
        if not data:
            return cls()
        children = {}
        for name, (path, stats) in data["children"].items():
            whole = stats if isinstance(stats, KVConnectorStats) else _restore(tuple(path), stats)
            if whole is not None:
                children[name] = (tuple(path), whole)
        return cls({**data, "children": children, "more": [*data["more"]], "pending": {**data["pending"]}})

    @classmethod
    def of(
        cls, children: Mapping[str, tuple[ClassPath, KVConnectorStats]], counts: Counts | None
    ) -> MultiStats:
        """Combine the stats of the child connectors with the counts of how often each child was chosen.

        Args:
            children: maps a child's name to (module and name of the connector's class, stats of the child).
            counts: counts of the choices, whose increments are cleared; None on a worker.
        """
        more = counts.take() if counts is not None else {}
        pending = dict(counts.pending) if counts is not None and more else {}
        return cls(
            {"children": dict(children), "more": [[*key, n] for key, n in more.items()], "pending": pending}
        )

    def reset(self) -> None:
        """Clear all stats."""
        self.data = {"children": {}, "more": [], "pending": {}}

    def to_dict(self) -> dict[str, Any]:
        """Return the stats as plain values (numbers, strings, lists and dicts), which `read` accepts."""
        children = {
            name: [list(path), stats.to_dict()] for name, (path, stats) in self.data["children"].items()
        }
        return {**self.data, "children": children}

    def aggregate(self, other: KVConnectorStats) -> MultiStats:
        """Add later stats to this object, and return this object."""
        ours = self.data["children"]
        for name, (path, stats) in other.data["children"].items():
            ours[name] = (path, ours[name][1].aggregate(stats) if name in ours else stats)
        self.data["more"] += other.data["more"]
        self.data["pending"] |= other.data["pending"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a summary of the stats for the engine's log, as numbers by name."""
        said: dict[str, int | float] = {}
        for metric, name, outcome, n in self.data["more"]:
            key = " ".join(filter(None, (name, outcome, metric.replace("_", " "))))
            said[key] = said.get(key, 0) + n
        for name, (_, stats) in self.data["children"].items():
            if not stats.is_empty():
                said |= {f"{name} {key}": value for key, value in stats.reduce().items()}
        return said

    def is_empty(self) -> bool:
        """Return True if there are no stats to report."""
        return not self.data["more"] and all(stats.is_empty() for _, stats in self.data["children"].values())


def _restore(path: ClassPath, data: Any) -> KVConnectorStats | None:
    """Restore the stats of a child connector from plain values; None if the connector's class has no stats.

    Args:
        path: module and qualified name of the connector's class, which restores the stats.
        data: plain values of the stats.
    """
    module, name = path
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    stats: KVConnectorStats | None = found.build_kv_connector_stats(data)
    return stats
