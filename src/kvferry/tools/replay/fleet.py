"""The host memory of a fleet's engines, which each engine reads as a tier.

A reader always knows what every other engine holds. An engine that serves has to ask, and the answer may be
late or out of date.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from kvferry.tiers import EvictionPolicy
from kvferry.tools.replay.lookup import ReadableTier, SimulatedTier


class FleetMemory:
    """The holders of all chunks in the host memory of a fleet.

    Attributes:
        holders: numbers of the engines that hold each chunk, by key.
        read_bytes: bytes that each engine has read from others.
        sent_bytes: bytes that others have read from each engine.

    Args:
        seed: seed of the choice among several holders.
    """

    def __init__(self, engines: int, seed: int) -> None:
        self.holders: dict[bytes, list[int]] = {}
        self.read_bytes, self.sent_bytes = [0] * engines, [0] * engines
        self._chance = random.Random(seed)  # noqa: S311 - a simulation
        # Most chunks have one holder. They share its list, which never changes.
        self._alone = [[number] for number in range(engines)]

    def add(self, engine: int, keys: Sequence[bytes]) -> None:
        holders, alone = self.holders, self._alone[engine]
        for key in keys:
            if (found := holders.setdefault(key, alone)) is alone:
                continue
            if len(found) == 1:
                holders[key] = [*found, engine]
            else:
                found.append(engine)

    def remove(self, engine: int, keys: Sequence[bytes]) -> None:
        holders = self.holders
        for key in keys:
            found = holders[key]
            if len(found) == 1:
                del holders[key]
                continue
            found.remove(engine)
            if len(found) == 1:
                holders[key] = self._alone[found[0]]

    def count_reads(self, reader: int, keys: Sequence[bytes], chunk_bytes: int) -> None:
        """Count a read of each chunk from one of its holders, chosen by chance, as engines choose it."""
        self.read_bytes[reader] += chunk_bytes * len(keys)
        for key in keys:
            self.sent_bytes[self._chance.choice(self.holders[key])] += chunk_bytes


class OthersMemory(ReadableTier):
    """The host memory of all other engines, as a tier of one engine.

    It also names the engine's own chunks. They are never loaded from here, because host memory comes first.
    """

    is_searched = True

    def __init__(self, fleet: FleetMemory, engine: int, chunk_bytes: Sequence[int]) -> None:
        super().__init__(chunk_bytes, fleet.holders)
        self._fleet, self._engine = fleet, engine

    def count_reads(self, keys: Sequence[bytes], group: int) -> int:
        self._fleet.count_reads(self._engine, keys, self.chunk_bytes[group])
        return super().count_reads(keys, group)


class SharedHostMemory(SimulatedTier):
    """The host memory of an engine, which other engines read."""

    def __init__(
        self,
        fleet: FleetMemory,
        engine: int,
        capacity_bytes: int,
        chunk_bytes: Sequence[int],
        policy: Callable[[int], EvictionPolicy],
    ) -> None:
        super().__init__(capacity_bytes, chunk_bytes, policy)
        self._fleet, self._engine = fleet, engine

    def admit(self, keys: Sequence[bytes], group: int, cold: Collection[bytes] = ()) -> None:
        super().admit(keys, group, cold)
        self._fleet.add(self._engine, keys)

    def _forget(self, keys: Sequence[bytes]) -> None:
        super()._forget(keys)
        self._fleet.remove(self._engine, keys)
