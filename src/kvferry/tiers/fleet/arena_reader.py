"""READs from the arenas of other engines, from the threads that fetch chunks.

One NIXL agent of the scheduler's process makes this engine's arena readable, and reads the others'. NIXL gets
one call at a time, which lasts as long as the READ with some transports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.common.errors import KVFerryError, TransferError
from kvferry.geometry import Region
from kvferry.tiers.fleet.messages import HostMemory
from kvferry.transport.agent import Agent, ReadState
from kvferry.transport.metadata_validation import MetadataValidator, ValidationResult

logger = logging.getLogger(__name__)

_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 5e-4
_ONE = np.zeros(1, np.int32)


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
        self._agent, self._arena, self._validator = agent, arena, validator
        self._lock = threading.Lock()
        self._arenas: dict[int, _Arena] = {}  # by incarnation

    def knows(self, incarnation: int) -> bool:
        return incarnation in self._arenas

    def add(self, memory: HostMemory, seconds: float) -> None:
        """Load the transport metadata of an arena. Block until it has been tried.

        Raises:
            TransferError: it cannot be used, or the trial did not end in time.
        """
        tried = threading.Event()
        result: ValidationResult = self._validator.validate([memory], tried.set)
        if not tried.wait(seconds):
            raise TransferError(f"its transport metadata was not tried within {seconds:g} s")
        if result.reason:
            raise TransferError(result.reason)
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
        try:
            self._read(arena, arena.memory.address + offset, into, size)
        except Exception as error:
            arena.left = True
            if isinstance(error, KVFerryError):
                raise
            raise TransferError(f"the transport fails: {error}") from error
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

    def _read(self, arena: _Arena, source: int, into: int, size: int) -> None:
        undo: list[Callable[[], None]] = []
        try:
            with self._lock:
                ours = self._agent.prepare(None, self._arena, np.array([(into, size, size, 1)], np.int64))
                undo.append(lambda: self._agent.release_list(ours))
                there = Region(arena.memory.address, arena.memory.bytes)
                rows = np.array([(source, size, size, 1)], np.int64)
                theirs = self._agent.prepare(arena.name, there, rows)
                undo.append(lambda: self._agent.release_list(theirs))
                handle: Any = self._agent.read(ours, _ONE, theirs, _ONE)
                undo.append(lambda: self._agent.release(handle))
                state = self._agent.post(handle)
            nap = _SHORTEST_NAP
            while state is ReadState.IN_FLIGHT:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
                with self._lock:
                    state = self._agent.state(handle)
        finally:
            with self._lock:
                for step in reversed(undo):
                    step()
        if state is ReadState.FAILED:
            raise TransferError("its host memory cannot be read")
