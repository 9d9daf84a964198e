"""The eviction policies: S3-FIFO, ARC, and LRU, the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.tiers.eviction.base import ByteQueue, EvictionPolicy

# The small queue has one tenth of the bytes, as in the paper.
_SMALL_SHARE = 10
# Maximum number of counted uses of a key; number of uses from which a key moves to main.
_MOST_USES, _PROMOTED_FROM = 3, 2


class S3FIFO(EvictionPolicy):
    """S3-FIFO: three first-in-first-out queues, so that keys used once are evicted early.

    Juncheng Yang, Yazhuo Zhang, Ziyue Qiu, Yao Yue, K. V. Rashmi, "FIFO queues are all you need for cache
    eviction", SOSP 2023, algorithm 1. Main evicts without a ghost.

          admit ──▶ small ──used twice──▶ main ─┐ used: reinserted
            │         └──else──▶ ghost    ▲  └──┘ else: evicted
            └──────── ghost ──────────────┘

    Differences from the paper: sizes are in bytes, not objects, and ghosts may have as many bytes as main's
    share of the capacity. A key that is unpinned becomes the newest of its queue.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._small_bytes = capacity_bytes // _SMALL_SHARE
        self._small, self._main, self._ghosts = ByteQueue(), ByteQueue(), ByteQueue()
        self._uses: dict[bytes, int] = {}
        super().__init__(capacity_bytes, [self._small, self._main], [self._ghosts])

    def _touch(self, key: bytes) -> None:
        self._uses[key] = min(self._uses[key] + 1, _MOST_USES)

    def remove(self, key: bytes) -> int:
        self._uses.pop(key, None)  # a cold key has none
        return super().remove(key)

    def _evict_warm(self) -> bytes | None:
        # Each move of a used key reduces its uses, so a call takes amortised constant time.
        while self._small.unpinned or self._main.unpinned:
            small = self._small.total >= self._small_bytes or not self._main.unpinned
            key = self._evict_small() if small and self._small.unpinned else self._evict_main()
            if key is not None:
                return key
        return None

    def check_integrity(self) -> None:
        super().check_integrity()
        if self._ghosts.total > self.capacity_bytes - self._small_bytes:
            raise AssertionError(f"ghosts stand for {self._ghosts.total} bytes of {self.capacity_bytes}")
        warm = len(self._small) + len(self._main)
        if len(self._uses) != warm or any(key not in self for key in self._uses):
            raise AssertionError("uses are counted of other keys than those in the queues")

    def _place(self, key: bytes, size: int) -> None:
        known = key in self._ghosts
        if known:
            self._ghosts.remove(key)
        (self._main if known else self._small).push(key, size)
        self._uses[key] = 0

    def _evict_small(self) -> bytes | None:
        """Evict the oldest key of small, and remember it as a ghost; or move it to main and return None."""
        key, size = self._small.pop()
        if self._uses[key] >= _PROMOTED_FROM:
            self._uses[key] = 0
            self._main.push(key, size)
            return None
        del self._uses[key]
        self._ghosts.push(key, size)
        self._ghosts.trim(self.capacity_bytes - self._small_bytes)
        return key

    def _evict_main(self) -> bytes | None:
        """Evict the oldest key of main; or reinsert it, reduce its uses by 1, and return None."""
        key, size = self._main.pop()
        if self._uses[key]:
            self._uses[key] -= 1
            self._main.push(key, size)
            return None
        del self._uses[key]
        return key


class ARC(EvictionPolicy):
    """ARC: one LRU of keys used once, one of keys used again, and an adaptive boundary between them.

    Nimrod Megiddo and Dharmendra S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
    figure 4: `_recent` is T1, `_frequent` T2, their ghosts are B1 and B2, and `_target` is p, the bytes that
    `_recent` should have.

    Differences from the paper: sizes are in bytes, not pages. The victim is chosen before the new key is
    known, so the target moves after the replacement, and REPLACE needs no tie-break for a page of B2.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._target = 0.0
        self._recent, self._frequent = resident = ByteQueue(), ByteQueue()
        self._recent_ghosts, self._frequent_ghosts = ghosts = ByteQueue(), ByteQueue()
        super().__init__(capacity_bytes, resident, ghosts)

    def _touch(self, key: bytes) -> None:
        if key in self._recent:
            self._recent.move(key, self._frequent)
        else:
            self._frequent.make_newest(key)

    def _evict_warm(self) -> bytes | None:
        """Evict a key from the queue that exceeds its target. The paper calls this REPLACE."""
        if self._recent.unpinned and (self._recent.total > self._target or not self._frequent.unpinned):
            queue, ghosts = self._recent, self._recent_ghosts
        elif self._frequent.unpinned:
            queue, ghosts = self._frequent, self._frequent_ghosts
        else:
            return None
        key, size = queue.pop()
        ghosts.push(key, size)
        self._trim()
        return key

    def check_integrity(self) -> None:
        super().check_integrity()
        recent = self._recent.total + self._recent_ghosts.total
        everything = recent + self._frequent.total + self._frequent_ghosts.total
        if recent > self.capacity_bytes or everything > 2 * self.capacity_bytes:
            raise AssertionError(f"T1 + B1 are {recent} bytes, all {everything}, of {self.capacity_bytes}")
        if not 0 <= self._target <= self.capacity_bytes:
            raise AssertionError(f"target {self._target} is outside the capacity {self.capacity_bytes}")

    def _place(self, key: bytes, size: int) -> None:
        again = self._learn(key, size)
        (self._frequent if again else self._recent).push(key, size)
        self._trim()

    def _learn(self, key: bytes, size: int) -> bool:
        """Adapt the target, and forget the ghost, if the key has one; return whether it has."""
        recent, frequent = self._recent_ghosts.total, self._frequent_ghosts.total
        if key in self._recent_ghosts:
            self._target = min(self._target + size * max(1.0, frequent / recent), self.capacity_bytes)
            self._recent_ghosts.remove(key)
        elif key in self._frequent_ghosts:
            self._target = max(self._target - size * max(1.0, recent / frequent), 0.0)
            self._frequent_ghosts.remove(key)
        else:
            return False
        return True

    def _trim(self) -> None:
        """Forget the oldest ghosts: T1 + B1 to the capacity, and all four queues to twice the capacity."""
        self._recent_ghosts.trim(self.capacity_bytes - self._recent.total)
        rest = 2 * self.capacity_bytes - self.used_bytes - self._recent_ghosts.total
        self._frequent_ghosts.trim(rest)


class LRU(EvictionPolicy):
    """Least recently used, without ghosts. A scan larger than the capacity evicts everything else."""

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
