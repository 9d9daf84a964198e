"""What the halves of a `FerryMultiConnector` say to each other: their children's words, side by side.

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
    """Scheduler half to worker halves.

    Attributes:
        children: by place in the configuration.
        loads: request to the child that now loads it; no other child's word on its arrival counts.
        holders: request that has ended to the children that still need its blocks.
    """

    children: tuple[KVConnectorMetadata, ...]
    loads: dict[str, int] = field(default_factory=dict)
    holders: dict[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MultiWorkerMeta(KVConnectorWorkerMetadata):
    """Worker half to scheduler half; None where a child has said nothing."""

    children: tuple[KVConnectorWorkerMetadata | None, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiWorkerMeta:
        """Both workers' words as one."""
        assert isinstance(other, MultiWorkerMeta)
        return MultiWorkerMeta(
            tuple(
                (mine.aggregate(theirs) if theirs is not None else mine) if mine is not None else theirs
                for mine, theirs in zip(self.children, other.children, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class MultiHandshake(KVConnectorHandshakeMetadata):
    """What a worker's children tell their scheduler halves at start; None where one has nothing to tell."""

    children: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiEvents(KVConnectorKVEvents):
    """KV cache events of a worker's children, which the engine joins over the workers.

    vLLM joins by adding another's list and counting one worker more. Children count by themselves: not every
    child of every worker has events in a step.
    """

    def __init__(self, children: tuple[KVConnectorKVEvents | None, ...]) -> None:
        self.children = list(children)

    def get_all_events(self) -> list[Any]:
        """(place of the child, its events) of those that have any."""
        return [(place, of) for place, of in enumerate(self.children) if of is not None]

    def add_events(self, events: list[Any]) -> None:
        """Another worker's."""
        for place, theirs in events:
            mine = self.children[place]
            if mine is None:
                self.children[place] = theirs
            else:
                mine.add_events(theirs.get_all_events())
                mine.increment_workers(theirs.get_number_of_workers())

    def aggregate(self) -> MultiEvents:
        """Each child's, joined as it joins them."""
        return MultiEvents(tuple(of.aggregate() if of is not None else None for of in self.children))

    def increment_workers(self, count: int = 1) -> None:
        """Nothing: see the class."""

    def get_number_of_workers(self) -> int:
        """The most that any child has heard of."""
        return max((of.get_number_of_workers() for of in self.children if of is not None), default=0)

    def clear_events(self) -> None:
        """Forget all."""
        for of in self.children:
            if of is not None:
                of.clear_events()
