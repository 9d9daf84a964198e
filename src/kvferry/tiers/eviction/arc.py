"""ARC: one LRU of keys used once, one of keys used again, and an adaptive boundary between them.

Nimrod Megiddo and Dharmendra S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
figure 4. `recent` is the paper's T1, and `frequent` is T2. Each has *ghosts*, the keys that were evicted from
it: B1 and B2 in the paper. `target` is p, the bytes that `recent` should have. If a new key has a ghost in
B1, `recent` was too small. If it has one in B2, `frequent` was too small.

Simplifications:
- Sizes are in bytes, not pages. A ghost hit moves the target by the key's size, times the ratio of the bytes
  in B1 and B2, if that is above 1.
- The victim is chosen before the new key is known. So the target moves after the replacement, not before it,
  and the tie-break of REPLACE for a page of B2 is not needed.
- Ghosts are trimmed when a queue gets a key: T1 + B1 to the capacity, and all four to twice the capacity.
"""

from __future__ import annotations

from kvferry.tiers.eviction.base import EvictionPolicy
from kvferry.tiers.eviction.queue import ByteQueue


class ARC(EvictionPolicy):
    """The ARC eviction policy (adaptive replacement cache)."""

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
