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
    """The ARC eviction policy (adaptive replacement cache).

    The queue `recent` has keys that were used once, and the queue `frequent` has keys that were used again.
    If an evicted key is soon admitted again, the policy shifts capacity to the queue that the key was evicted
    from.

    Args:
        capacity_bytes: maximum total bytes of all chunks.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._target = 0.0
        self._recent, self._frequent = resident = ByteQueue(), ByteQueue()
        self._recent_ghosts, self._frequent_ghosts = ghosts = ByteQueue(), ByteQueue()
        super().__init__(capacity_bytes, resident, ghosts)

    def _touch(self, key: bytes) -> None:
        """Record that the chunk of a key was used.

        The key becomes the newest key of the queue `frequent`.

        Raises:
            KeyError: the key is not admitted.
        """
        if key in self._recent:
            self._recent.move(key, self._frequent)
        else:
            self._frequent.make_newest(key)

    def _evict_warm(self) -> bytes | None:
        """Choose a key to evict, remove the key from the policy, and return it; None if all keys are pinned.

        The evicted key is remembered for a while. The ARC paper calls this operation REPLACE.
        """
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
        """Check that all queues are consistent, and that their sizes are within the limits of the policy.

        Also check that the target size of the queue `recent` is within the capacity.

        Raises:
            AssertionError: a check fails.
        """
        super().check_integrity()
        recent = self._recent.total + self._recent_ghosts.total
        everything = recent + self._frequent.total + self._frequent_ghosts.total
        if recent > self.capacity_bytes or everything > 2 * self.capacity_bytes:
            raise AssertionError(f"T1 + B1 are {recent} bytes, all {everything}, of {self.capacity_bytes}")
        if not 0 <= self._target <= self.capacity_bytes:
            raise AssertionError(f"target {self._target} is outside the capacity {self.capacity_bytes}")

    def _place(self, key: bytes, size: int) -> None:
        """Put a newly admitted key into one of two queues.

        The queue is `frequent` (keys used more than once) if the policy remembers an earlier eviction of the
        key, else `recent` (keys used once).

        Args:
            key: key of the chunk.
            size: bytes of the chunk.
        """
        again = self._learn(key, size)
        (self._frequent if again else self._recent).push(key, size)
        self._trim()

    def _learn(self, key: bytes, size: int) -> bool:
        """Adapt the target of `recent` if the policy remembers an earlier eviction of a key.

        The *target* is the number of bytes that the queue `recent` should have. It grows if the key was
        evicted from `recent` (keys used once), and shrinks if the key was evicted from `frequent` (keys used
        again). The policy then forgets the eviction.

        Args:
            key: key of a chunk that is being admitted.
            size: bytes of the chunk.

        Returns:
            Whether the policy remembered an eviction of the key. If not, the call has changed nothing.
        """
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
        """Forget the oldest ghosts (remembered keys of evicted chunks) until two limits are respected.

        A key or a ghost counts with the bytes of its chunk. The keys in `recent` and the ghosts evicted from
        `recent` may together have as many bytes as the capacity. All keys and ghosts may have twice as many.
        """
        self._recent_ghosts.trim(self.capacity_bytes - self._recent.total)
        rest = 2 * self.capacity_bytes - self.used_bytes - self._recent_ghosts.total
        self._frequent_ghosts.trim(rest)
