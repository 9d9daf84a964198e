"""Least recently used: the baseline. One scan through more than the capacity empties it of all else."""

from __future__ import annotations

from kvferry.tiers.eviction.base import EvictionPolicy
from kvferry.tiers.eviction.queue import ByteQueue


class LRU(EvictionPolicy):
    """What was not used for longest goes first. No ghosts."""

    def __init__(self, capacity_bytes: int) -> None:
        self._queue = ByteQueue()
        super().__init__(capacity_bytes, [self._queue])

    def touch(self, key: bytes) -> None:
        """As of `EvictionPolicy`."""
        self._queue.renew(key)

    def evict(self) -> bytes | None:
        """As of `EvictionPolicy`."""
        return self._queue.pop()[0] if self._queue.loose else None

    def _place(self, key: bytes, size: int) -> None:
        self._queue.push(key, size)
