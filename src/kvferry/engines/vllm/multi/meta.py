"""Messages between the halves of a `FerryMultiConnector`: their children's messages, side by side.

The engine carries these within itself (pickled between its own processes).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.engines.vllm.compat.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorKVEvents,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(slots=True)
class MultiMeta(KVConnectorMetadata):
    """Message of the scheduler half to the worker halves.

    Attributes:
        children: the children's messages, in the order of the configuration.
        loads: request to the child that now loads it; only this child can report its arrival.
        holders: ended request to the children that still need its blocks.
    """

    children: tuple[KVConnectorMetadata, ...]
    loads: dict[str, int] = field(default_factory=dict)
    holders: dict[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MultiWorkerMeta(KVConnectorWorkerMetadata):
    """Message of a worker half to the scheduler half; None for a child without a message."""

    children: tuple[KVConnectorWorkerMetadata | None, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerMeta:
        """Join the messages of two workers."""
        assert isinstance(other, MultiWorkerMeta)
        return MultiWorkerMeta(
            tuple(
                (mine.aggregate(theirs) if theirs is not None else mine) if mine is not None else theirs
                for mine, theirs in zip(self.children, other.children, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class MultiHandshake(KVConnectorHandshakeMetadata):
    """Handshakes of a worker's children for their scheduler halves at start; None for a child without one."""

    children: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiEvents(KVConnectorKVEvents):
    """KV cache events of a worker's children, which the engine joins over the workers.

    vLLM joins by adding another worker's list and counting one worker more. Children count by themselves: not
    every child of every worker has events in a step.
    """

    def __init__(self, children: tuple[KVConnectorKVEvents | None, ...]) -> None:
        self.children = list(children)

    def get_all_events(self) -> list[Any]:
        """Return (index of the child, its events) for every child that has events."""
        return [(place, of) for place, of in enumerate(self.children) if of is not None]

    def add_events(self, events: list[Any]) -> None:
        """Add another worker's events."""
        for place, theirs in events:
            mine = self.children[place]
            if mine is None:
                self.children[place] = theirs
            else:
                mine.add_events(theirs.get_all_events())
                mine.increment_workers(theirs.get_number_of_workers())

    def aggregate(self) -> MultiEvents:
        """Return each child's events, joined by the child's own class."""
        return MultiEvents(tuple(of.aggregate() if of is not None else None for of in self.children))

    def increment_workers(self, count: int = 1) -> None:
        """Do nothing: the children count workers by themselves."""

    def get_number_of_workers(self) -> int:
        """Return the largest number of workers that any child counts."""
        return max((of.get_number_of_workers() for of in self.children if of is not None), default=0)

    def clear_events(self) -> None:
        """Clear the events of all children."""
        for of in self.children:
            if of is not None:
                of.clear_events()
