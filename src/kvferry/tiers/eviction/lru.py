"""Least recently used, the baseline policy. A scan larger than the capacity evicts everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    @property
    def used_bytes(self) -> int:
        """Total bytes of the chunks whose keys are admitted, pinned or not."""
        return self._queue.total + self._cold.total

    def _touch(self, key: bytes) -> None:
        """Record that the chunk of a key was used: rank the key as the newest.

        Raises:
            KeyError: the key is not admitted.
        """
        self._queue.make_newest(key)

    def touch_all(self, keys: Sequence[bytes]) -> None:
        """Record a use of each chunk: rank the keys as the newest, the last one newest of all.

        Raises:
            KeyError: a key is not admitted.
        """
        self._make_warm(keys)
        for key in keys:
            self._queue.make_newest(key)

    def oldest(self, size: int) -> list[bytes]:
        """Return the keys that `evict_bytes` would evict, and change nothing."""
        keys, found = self._cold.oldest(size)
        more, _ = self._queue.oldest(size - found)
        return keys + more

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
