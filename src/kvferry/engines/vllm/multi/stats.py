"""Stats of the children and of the choice between them, on their way to the engine's /metrics.

vLLM sends stats between processes as plain values (numbers, strings, lists and dicts). In the other process,
it restores them with the connector's class, without the engine's configuration. So the stats of each child
carry the module and name of the connector class that restores them.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.engines.vllm.compat.contract import KVConnectorStats

logger = logging.getLogger(__name__)

ClassPath = tuple[str, str]
"""(module, qualified name) of a connector's class."""


Count = tuple[str, str, str]
"""Labels of a counter: (metric, name of the child, outcome). The outcome is empty for metrics without one."""


@dataclass(slots=True)
class Counts:
    """Counts of how often each child is chosen, and of how its loads end.

    Attributes:
        increments: increment of each counter since the last call of `take`.
        pending: number of asynchronous loads in flight, by name of the child; not cleared by `take`.
    """

    increments: Counter[Count] = field(default_factory=Counter)
    pending: Counter[str] = field(default_factory=Counter)

    def admitted(self, answers: Iterable[tuple[str, int | None]], loader: str | None, tokens: int) -> None:
        """Count the admission of a request for each child, as a hit, a miss or a passed-over offer.

        Args:
            answers: (name, number of tokens offered) of each child; None if it was still looking for KV.
            loader: name of the child that loads the request; None if no child does.
            tokens: number of tokens that the loader loads.
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
        """Count the end of a child's load. A late one is one that the request has gone on without."""
        self.increments["loads", name, "expired" if late else "ready" if succeeded else "failed"] += 1

    def take(self) -> Counter[Count]:
        """Return the increments of all counters since the last call, and clear these increments."""
        taken, self.increments = self.increments, Counter()
        return taken


def path_of(cls: type) -> ClassPath:
    """Return the path of a class."""
    return cls.__module__, cls.__qualname__


class MultiStats(KVConnectorStats):
    """Stats of a `FerryMultiConnector` and its children, from which the engine's metrics are updated.

    Attributes:
        data: ``children`` maps a child's name to (path of the connector's class, stats of the child).
            ``more`` has a list [metric, name of the child, outcome, increment] per counter, on the scheduler
            only. ``pending`` maps a child's name to its asynchronous loads in flight; empty if ``more`` is
            empty.
    """

    data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(data) if data else {})
        if not self.data:
            self.reset()

    @classmethod
    def read(cls, data: Mapping[str, Any] | None) -> MultiStats:
        """Restore stats from the result of `to_dict`; None or empty for no stats."""
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
        """Combine the stats of the children with the counts of choices, whose increments are cleared.

        Args:
            children: (path of the connector's class, stats of the child), by name of the child.
            counts: counts of the choices; None on a worker.
        """
        more = counts.take() if counts is not None else {}
        pending = dict(counts.pending) if counts is not None and more else {}
        return cls(
            {"children": dict(children), "more": [[*key, n] for key, n in more.items()], "pending": pending}
        )

    def reset(self) -> None:
        self.data = {"children": {}, "more": [], "pending": {}}

    def to_dict(self) -> dict[str, Any]:
        """Return the stats as plain values (numbers, strings, lists and dicts), which `read` accepts."""
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
    stats: KVConnectorStats | None = found.build_kv_connector_stats(data)
    return stats
