"""Least recently used: the baseline. One scan through more than the capacity empties it of all else."""

from __future__ import annotations

from kvferry.tiers.eviction.base import check_admission
from kvferry.tiers.eviction.queue import ByteQueue


class LRU:
    """What was not used for longest goes first. No ghosts."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._queue = ByteQueue()

    @property
    def used_bytes(self) -> int:
        """As of `Policy`."""
        return self._queue.total

    def __len__(self) -> int:
        """As of `Policy`."""
        return len(self._queue)

    def __contains__(self, key: object) -> bool:
        """As of `Policy`."""
        return key in self._queue

    def admit(self, key: bytes, size: int) -> None:
        """As of `Policy`."""
        check_admission(self, key, size)
        self._queue.push(key, size)

    def touch(self, key: bytes) -> None:
        """As of `Policy`."""
        self._queue.renew(key)

    def pin(self, key: bytes) -> None:
        """As of `Policy`."""
        self._queue.pin(key)

    def unpin(self, key: bytes) -> None:
        """As of `Policy`."""
        self._queue.unpin(key)

    def remove(self, key: bytes) -> None:
        """As of `Policy`."""
        self._queue.remove(key)

    def evict(self) -> bytes | None:
        """As of `Policy`."""
        return self._queue.pop()[0] if self._queue.loose else None

    def check_integrity(self) -> None:
        """As of `Policy`."""
        self._queue.check_integrity()
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are admitted, capacity is {self.capacity_bytes}")
