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
from kvferry.tiers.storage_tier import LateFetch
from kvferry.transport.agent import Agent
from kvferry.transport.blocking import BlockingTransfers, PostedTransfer
from kvferry.transport.metadata_validation import MetadataValidator

logger = logging.getLogger(__name__)

READ_SECONDS = 2.0
"""Time after which a small READ is late."""
# Bytes per second of one of several READs over a slow network. A large READ gets more time.
_SLOWEST = 32e6


@dataclass(slots=True)
class _Arena:
    """The arena of another engine's run. NIXL knows it as `name` while it is loaded."""

    memory: HostMemory
    name: str
    reads: int = 0  # number of READs in flight
    left: bool = False  # True if the arena is to be dropped when no READ is in flight


@dataclass(frozen=True, slots=True)
class _LateRead:
    """A READ that was late, with the memory to which it may still write."""

    transfer: PostedTransfer
    arena: _Arena
    memory: memoryview


class ArenaReader:
    """Reads other engines' arenas. Any thread may use it.

    Args:
        agent: agent with which `arena` is registered. The reader closes it.
        arena: this engine's arena, into which is read.
        validator: tries transport metadata in a child process before `agent` loads it.
    """

    def __init__(self, agent: Agent, arena: Region, validator: MetadataValidator) -> None:
        self._agent, self._validator = agent, validator
        self._transfers = BlockingTransfers(agent, arena)
        self._lock = self._transfers.lock
        self._arenas: dict[int, _Arena] = {}  # by incarnation
        self._late: dict[LateFetch, _LateRead] = {}

    def knows(self, incarnation: int) -> bool:
        return incarnation in self._arenas

    def is_late(self, incarnation: int) -> bool:
        """Return whether a late READ from an engine's run is in flight."""
        return any(one.arena.memory.incarnation == incarnation for one in list(self._late.values()))

    @property
    def late_bytes(self) -> int:
        """Bytes to which late READs may still write."""
        return sum(len(one.memory) for one in list(self._late.values()))

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

    def read(self, incarnation: int, offset: int, into: memoryview) -> None:
        """Read bytes of an arena into memory of this engine's arena. Block until no byte arrives any more.

        If the READ fails or is late, the arena is forgotten, because its process or machine may be gone.

        Raises:
            TransferError: the arena is unknown or has no such bytes, or the READ failed.
            LateFetch: the READ has not ended in time. Nothing is read from the arena before it has.
        """
        size = len(into)
        with self._lock:
            arena = self._arenas.get(incarnation)
            if arena is None or arena.left:
                raise TransferError("its transport metadata is not known, or an earlier READ has not ended")
            if offset + size > arena.memory.bytes:
                raise TransferError(
                    f"{size} bytes at {offset} of host memory, which has {arena.memory.bytes} bytes there"
                )
            arena.reads += 1
        there = Region(arena.memory.address, arena.memory.bytes)
        ours = np.frombuffer(into, np.uint8).ctypes.data
        pieces = (np.array([each], np.int64) for each in (ours, there.address + offset, size))
        seconds = READ_SECONDS + size / _SLOWEST
        try:
            transfer = self._transfers.post("READ", arena.name, there, *pieces)
            in_time = transfer.wait(seconds)
        except TransferError:
            arena.left = True
            self._end_read(arena)
            raise
        if in_time:
            self._end_read(arena)
            return
        arena.left = True
        late = LateFetch(f"a READ of {size} bytes has not ended after {seconds:.1f} s")
        self._late[late] = _LateRead(transfer, arena, into)
        raise late

    def poll_late(self) -> None:
        """Let go of the memory of late READs that have ended. Only one thread may call this."""
        for late, read in list(self._late.items()):
            if read.transfer.over:
                del self._late[late]
                self._end_read(read.arena)
                late.over = True

    def _end_read(self, arena: _Arena) -> None:
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
        """Drop all arenas. If a READ is late, leave it, its memory and the agent as they are."""
        self.poll_late()
        if self._late:
            return
        with self._lock:
            for arena in list(self._arenas.values()):
                arena.left = True
                self._drop_unused(arena)
        self._agent.close()

    def _drop_unused(self, arena: _Arena) -> None:
        if arena.left and not arena.reads and self._arenas.get(arena.memory.incarnation) is arena:
            del self._arenas[arena.memory.incarnation]
            try:
                self._agent.drop_peer(arena.name)
            except Exception as error:  # noqa: BLE001 - nothing is read from it any more
                logger.debug("fleet: NIXL cannot remove %s: %s", arena.name, error)
