"""The contract of an eviction policy, and what all of them have in common.

A policy ranks keys; it holds no bytes and frees none. It is told what became of every key, and says who goes:

    admit(key, bytes)   the key's bytes are there now; a key that was evicted lately may be ranked by that
    touch(key)          it was used
    renew(key)          its use was a moment ago, as that of others is said: no use more, only the order
    pin / unpin         it is in use, and no more
    evict()             who goes: taken off the books, at most remembered as a ghost
    remove(key)         it is gone for another reason: forgotten, no ghost

**What mutates.** Every verb but the queries changes the policy and nothing else. Arguments are not kept,
except the key.

**When a key must be pinned.** As long as anybody reads its bytes: `evict` never names a pinned key, and the
caller may reuse the bytes of what `evict` named at once. Pins do not count: one `pin`, one `unpin`, and a
caller with several readers pins for the first and unpins after the last. Unpinned, a key is ranked as used
just now.

**What is unsafe.** Not thread-safe. The sum of `admit`ted bytes must stay within the capacity: evict first.

Everything is counted in bytes, since keys differ in size, ghosts too: a ghost takes no memory to speak of,
but how many there may be follows from the bytes they stood for. Every verb takes time independent of how many
keys there are; `evict` of S3-FIFO on average over calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvferry.tiers.eviction.queue import ByteQueue, check_disjoint


class EvictionPolicy(ABC):
    """One ranking of keys; see the module for what all of them promise.

    Every admitted key is in one of a policy's *homes*, queues from which `evict` takes; other queues are of
    ghosts. A policy says where a key comes in, where it goes when it is used, and who leaves.

    Attributes:
        capacity_bytes: what it was made for.
    """

    def __init__(
        self, capacity_bytes: int, homes: Sequence[ByteQueue], ghosts: Sequence[ByteQueue] = ()
    ) -> None:
        """Empty; the queues are the policy's own."""
        self.capacity_bytes = capacity_bytes
        self._homes = homes
        self._queues = (*homes, *ghosts)

    @property
    def used_bytes(self) -> int:
        """Bytes of all admitted keys, pinned ones too."""
        return sum(queue.total for queue in self._homes)

    def __len__(self) -> int:
        """How many keys are admitted."""
        return sum(map(len, self._homes))

    def __contains__(self, key: object) -> bool:
        """Whether the key is admitted; ghosts are not."""
        return any(key in queue for queue in self._homes)

    def admit(self, key: bytes, size: int) -> None:
        """Rank a new key of `size` bytes, unpinned.

        Raises:
            ValueError: it is admitted already, `size` is not positive, or it exceeds the capacity.
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
        """The key was used. Raises KeyError if it is not admitted."""

    def renew(self, key: bytes) -> None:
        """Rank it as used just now; a pinned one will be when it is unpinned. KeyError if not admitted."""
        self._home(key).renew(key)

    def pin(self, key: bytes) -> None:
        """Never name it until it is unpinned. Raises KeyError if it is not admitted or is pinned."""
        self._home(key).pin(key)

    def unpin(self, key: bytes) -> None:
        """It may be named again. Raises KeyError if it is not pinned."""
        self._home(key).unpin(key)

    def remove(self, key: bytes) -> None:
        """Forget a key, pinned or not, without a ghost. Raises KeyError if it is not admitted."""
        self._home(key).remove(key)

    @abstractmethod
    def evict(self) -> bytes | None:
        """Take off and return the key that goes first; None if all that are left are pinned."""

    def check_integrity(self) -> None:
        """Compare the books with themselves; changes nothing, takes time with the number of keys.

        Raises:
            AssertionError: they contradict each other; the message says where.
        """
        check_disjoint(self._queues)
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are admitted, capacity is {self.capacity_bytes}")

    @abstractmethod
    def _place(self, key: bytes, size: int) -> None:
        """Put a key that is in no home and fits into one; its ghost ends."""

    def _home(self, key: bytes) -> ByteQueue:
        """The one that the key is in. Raises KeyError if there is none."""
        for queue in self._homes:
            if key in queue:
                return queue
        raise KeyError(key)
