"""The contract of an eviction policy, and what all policies share.

A policy ranks keys. It holds no bytes and frees none. The tier reports what happens to each key, and the
policy names the key to evict:

    admit(key, bytes)   add a key; its ghost, if it has one, may affect its rank
    touch(key)          the key was used
    make_newest(key)    rank the key as the latest used, without counting a use
    pin / unpin         exclude the key from eviction, and allow it again
    evict()             remove and return a key to evict; it may become a ghost
    remove(key)         remove a key for another reason, without a ghost

**What mutates.** Every method except the queries changes the policy and nothing else. The policy keeps
references to keys only.

**When a key must be pinned.** While its bytes are read: `evict` never names a pinned key, and the caller may
reuse the bytes of an evicted key at once. Pins are not counted: a caller with several readers pins for the
first and unpins after the last. An unpinned key ranks as the latest used.

**What is unsafe.** Not thread-safe. The sum of admitted bytes must stay within the capacity: evict first.

All limits are in bytes, because keys differ in size. Ghosts count with the bytes of their former chunks,
which limits their number. Every method takes constant time, `evict` of S3-FIFO on average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvferry.tiers.eviction.queue import ByteQueue, check_disjoint


class EvictionPolicy(ABC):
    """A ranking of keys.

    Every admitted key is in one of the policy's resident queues, from which `evict` takes. Its other queues
    hold ghosts. A subclass decides where a key enters, where it moves when it is used, and which key leaves.

    Attributes:
        capacity_bytes: bound on the sum of admitted bytes.
    """

    def __init__(
        self, capacity_bytes: int, resident: Sequence[ByteQueue], ghosts: Sequence[ByteQueue] = ()
    ) -> None:
        """Create an empty policy with the queues of the subclass."""
        self.capacity_bytes = capacity_bytes
        self._resident = resident
        self._queues = (*resident, *ghosts)

    @property
    def used_bytes(self) -> int:
        """Bytes of all admitted keys, including pinned ones."""
        return sum(queue.total for queue in self._resident)

    def __len__(self) -> int:
        """Return the number of admitted keys."""
        return sum(map(len, self._resident))

    def __contains__(self, key: object) -> bool:
        """Return whether the key is admitted; a ghost is not."""
        return any(key in queue for queue in self._resident)

    def admit(self, key: bytes, size: int) -> None:
        """Add an unpinned key of `size` bytes.

        Raises:
            ValueError: the key is admitted already, `size` is not positive, or it exceeds the capacity.
        """
        if key in self:
            raise ValueError(f"key {key.hex()} is admitted already")
        if not 0 < size <= self.capacity_bytes - self.used_bytes:
            raise ValueError(
                f"{size} bytes for key {key.hex()}, but {self.used_bytes} of {self.capacity_bytes} are used; "
                "evict before admitting"
            )
        self._place(key, size)

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Record a use of a key. Raises KeyError if it is not admitted."""

    def make_newest(self, key: bytes) -> None:
        """Rank a key as the latest used, a pinned key when it is unpinned. KeyError if not admitted."""
        self._queue_of(key).make_newest(key)

    def pin(self, key: bytes) -> None:
        """Exclude a key from eviction. Raises KeyError if it is not admitted or already pinned."""
        self._queue_of(key).pin(key)

    def unpin(self, key: bytes) -> None:
        """Allow eviction of a pinned key again. Raises KeyError if it is not pinned."""
        self._queue_of(key).unpin(key)

    def remove(self, key: bytes) -> None:
        """Forget a key, pinned or not, without a ghost. Raises KeyError if it is not admitted."""
        self._queue_of(key).remove(key)

    @abstractmethod
    def evict(self) -> bytes | None:
        """Remove and return the key to evict; None if all keys are pinned."""

    def check_integrity(self) -> None:
        """Check that all queues agree. Takes time with the number of keys.

        Raises:
            AssertionError: they disagree; the message names the contradiction.
        """
        check_disjoint(self._queues)
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are admitted, capacity is {self.capacity_bytes}")

    @abstractmethod
    def _place(self, key: bytes, size: int) -> None:
        """Put a new key that fits into a resident queue, and drop its ghost."""

    def _queue_of(self, key: bytes) -> ByteQueue:
        """Return the resident queue of a key. Raises KeyError if it has none."""
        for queue in self._resident:
            if key in queue:
                return queue
        raise KeyError(key)
