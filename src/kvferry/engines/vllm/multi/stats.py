"""Transport to the engine's /metrics of the children's stats, and of the choice between children.

vLLM sends stats between processes as plain values. It restores them with the connector's class, which knows
no configuration there. So each child's stats carry the path of the class that restores them.
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
"""Module and qualified name of a connector's class."""


def path_of(cls: type) -> ClassPath:
    """Return the module and the qualified name of a class."""
    return cls.__module__, cls.__qualname__


class MultiStats(KVConnectorStats):
    """Stats of a step, from one worker or from the scheduler.

    Attributes:
        data: ``children``: path of the connector's class, and its stats, by the child's name. ``more``:
            (metric, child, outcome, increment) of each counter. ``pending``: number of asynchronous loads
            under way, by child.
    """

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(data) if data else {})
        if not self.data:
            self.reset()

    @classmethod
    def read(cls, data: Mapping[str, Any] | None) -> MultiStats:
        """Restore stats from the values of `to_dict`, in this process or another one."""
        if not data:
            return cls()
        children = {}
        for name, (path, stats) in data["children"].items():
            whole = stats if isinstance(stats, KVConnectorStats) else _whole(tuple(path), stats)
            if whole is not None:
                children[name] = (tuple(path), whole)
        return cls({**data, "children": children, "more": [*data["more"]], "pending": {**data["pending"]}})

    @classmethod
    def of(
        cls, children: Mapping[str, tuple[ClassPath, KVConnectorStats]], counts: Counts | None
    ) -> MultiStats:
        """Combine the children's stats with the counts of the choice between them.

        Takes the increments out of `counts`, which may be None on a worker.
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
        """Return the stats as plain values, for `read`."""
        children = {
            name: [list(path), stats.to_dict()] for name, (path, stats) in self.data["children"].items()
        }
        return {**self.data, "children": children}

    def aggregate(self, other: KVConnectorStats) -> MultiStats:
        """Add later stats to these, and return the result; mutates this object."""
        ours = self.data["children"]
        for name, (path, stats) in other.data["children"].items():
            ours[name] = (path, ours[name][1].aggregate(stats) if name in ours else stats)
        self.data["more"] += other.data["more"]
        self.data["pending"] |= other.data["pending"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a summary of the stats for the engine's log."""
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


def _whole(path: ClassPath, data: Any) -> KVConnectorStats | None:
    """Restore a child's stats from plain values with its class; return None if the class makes none."""
    module, name = path
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    stats: KVConnectorStats | None = found.build_kv_connector_stats(data)
    return stats
