"""Messages between the halves of a `FerryMultiConnector`: the messages of its children, side by side.

The engine pickles them between its own processes. No other engine receives them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvferry.engines.vllm.compat.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorKVEvents,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvferry.engines.vllm.multi.late_loads import LateLoad


@dataclass(slots=True)
class MultiMeta(KVConnectorMetadata):
    """Message from the scheduler half of a `FerryMultiConnector` to its worker halves, once per step.

    Attributes:
        children: message of each child, in the order of the configuration.
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
    """Message from a worker half of a `FerryMultiConnector` to its scheduler half, once per step.

    Attributes:
        children: message of each child, in the order of the configuration; None for a child that sends none.
        ended: number of workers on which a load that was given up has ended, by the name of the load.
    """

    children: tuple[KVConnectorWorkerMetadata | None, ...]
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
