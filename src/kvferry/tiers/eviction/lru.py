"""Least recently used, the baseline policy. A scan larger than the capacity evicts everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.tiers.eviction.base import EvictionPolicy
from kvferry.tiers.eviction.queue import ByteQueue


class LRU(EvictionPolicy):
    """The LRU policy, which keeps no ghosts."""

    def __init__(self, capacity_bytes: int) -> None:
        self._queue = ByteQueue()
        super().__init__(capacity_bytes, [self._queue])

    @property
    def used_bytes(self) -> int:
        return self._queue.total + self._cold.total

    def _touch(self, key: bytes) -> None:
        self._queue.make_newest(key)

    def touch_all(self, keys: Sequence[bytes]) -> None:
        # One pass instead of two: a use makes a key the newest anyway.
        self._make_warm(keys)
        for key in keys:
            self._queue.make_newest(key)

    def oldest(self, size: int) -> list[bytes]:
        keys, found = self._cold.oldest(size)
        more, _ = self._queue.oldest(size - found)
        return keys + more

    def _evict_warm(self) -> bytes | None:
        return self._queue.pop()[0] if self._queue.unpinned else None

    def _evict_warm_bytes(self, size: int) -> list[bytes]:
        return self._queue.pop_bytes(size)

    def _place(self, key: bytes, size: int) -> None:
        self._queue.push(key, size)

    def _place_all(self, keys: Iterable[bytes], size: int) -> None:
        self._queue.push_all(keys, size)
