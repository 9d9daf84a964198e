"""Least recently used, the baseline policy. A scan larger than the capacity evicts everything else."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.tiers.eviction.base import EvictionPolicy
from kvferry.tiers.eviction.queue import ByteQueue


class LRU(EvictionPolicy):
    """The LRU policy, which evicts the least recently used key, and does not remember evicted keys.

    Args:
        capacity_bytes: maximum total bytes of all chunks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._queue = ByteQueue()
        super().__init__(capacity_bytes, [self._queue])

    def _touch(self, key: bytes) -> None:
        """Record that the chunk of a key was used: rank the key as the newest.

        Raises:
            KeyError: the key is not admitted.
        """
        self._queue.make_newest(key)

    def _evict_warm(self) -> bytes | None:
        """Remove the least recently used key from the policy, and return it; None if all keys are pinned."""
        return self._queue.pop()[0] if self._queue.unpinned else None

    def _evict_warm_bytes(self, size: int) -> list[bytes]:
        """Remove the least recently used keys until their chunks have `size` bytes. Return the keys."""
        return self._queue.pop_bytes(size)

    def _place(self, key: bytes, size: int) -> None:
        self._queue.push(key, size)

    def _place_all(self, keys: Iterable[bytes], size: int) -> None:
        self._queue.push_all(keys, size)
