"""READs from the arenas of other engines, from the threads that fetch chunks.

One NIXL agent of the scheduler's process makes this engine's arena readable, and reads the others'.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.tiers.fleet.messages import HostMemory
from kvferry.transport.agent import Agent
from kvferry.transport.blocking import BlockingTransfers
from kvferry.transport.metadata_validation import MetadataValidator

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Arena:
    """The arena of another engine's run. NIXL knows it as `name` while it is loaded."""

    memory: HostMemory
    name: str
    reads: int = 0  # number of READs in flight
    left: bool = False  # True if the arena is to be dropped when no READ is in flight


class ArenaReader:
    """Reads other engines' arenas. Any thread may use it.

    Args:
        agent: agent with which `arena` is registered.
        arena: this engine's arena, into which is read.
        validator: tries transport metadata in a child process before `agent` loads it.
    """

    def __init__(self, agent: Agent, arena: Region, validator: MetadataValidator) -> None:
        self._agent, self._validator = agent, validator
        self._transfers = BlockingTransfers(agent, arena)
        self._lock = self._transfers.lock
        self._arenas: dict[int, _Arena] = {}  # by incarnation

    def knows(self, incarnation: int) -> bool:
        return incarnation in self._arenas

    def add(self, memory: HostMemory, seconds: float) -> None:
        """Load the transport metadata of an arena. Block until it has been tried.

        Raises:
            TransferError: it cannot be used, or the trial did not end in time.
        """
        try:
            refusal = self._validator.validate([memory]).result(seconds)
        except TimeoutError:
            raise TransferError(f"its transport metadata was not tried within {seconds:g} s") from None
        if refusal:
            raise TransferError(refusal)
        with self._lock:
            if memory.incarnation not in self._arenas:
                name = self._agent.add_peer(memory.agent)
                self._arenas[memory.incarnation] = _Arena(memory, name)

    def read(self, incarnation: int, offset: int, into: int, size: int) -> None:
        """Read bytes of an arena to an address of this engine's arena. Block until no byte arrives any more.

        Raises:
            TransferError: the arena is unknown or has no such bytes, or the READ failed. In the last case it
                is forgotten, because its process may have ended.
        """
        with self._lock:
            arena = self._arenas.get(incarnation)
            if arena is None or arena.left:
                raise TransferError("its transport metadata is not known")
            if offset + size > arena.memory.bytes:
                raise TransferError(
                    f"{size} bytes at {offset} of host memory, which has {arena.memory.bytes} bytes there"
                )
            arena.reads += 1
        there = Region(arena.memory.address, arena.memory.bytes)
        pieces = (np.array([each], np.int64) for each in (into, there.address + offset, size))
        try:
            self._transfers.run("READ", arena.name, there, *pieces)
        except TransferError:
            arena.left = True
            raise
        finally:
            with self._lock:
                arena.reads -= 1
                self._drop_unused(arena)

    def forget(self, incarnation: int) -> None:
        """Drop an arena when no READ from it is in flight. Do nothing if it is unknown."""
        with self._lock:
            if (arena := self._arenas.get(incarnation)) is not None:
                arena.left = True
                self._drop_unused(arena)

    def close(self) -> None:
        """Drop all arenas. No READ may be in flight."""
        with self._lock:
            for arena in list(self._arenas.values()):
                arena.left = True
                self._drop_unused(arena)

    def _drop_unused(self, arena: _Arena) -> None:
        if arena.left and not arena.reads and self._arenas.get(arena.memory.incarnation) is arena:
            del self._arenas[arena.memory.incarnation]
            try:
                self._agent.drop_peer(arena.name)
            except Exception as error:  # noqa: BLE001 - nothing is read from it any more
                logger.debug("fleet: NIXL cannot remove %s: %s", arena.name, error)
