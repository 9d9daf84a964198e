"""The base class of eviction policies: their contract, and the code that all policies share.

A policy ranks keys. It neither stores nor frees the chunks. The tier reports what happens to each key, and
the policy chooses the key to evict. Some policies remember an evicted key as a *ghost*, without its chunk.
The tier calls these methods:

    admit(key, bytes)   add a key; a ghost of this key, if there is one, may affect its rank
    admit_all(...)      add the keys of several chunks of equal size
    touch(key)          record a use of the key
    touch_all(keys)     record a use of several keys, and rank them as the latest used
    make_newest(keys)   rank the keys as the latest used, without counting uses
    make_cold(keys)     evict the keys before all others, the oldest first
    pin / unpin         exclude the key from eviction, and allow it again
    evict()             remove and return a key to evict; it may become a ghost
    evict_bytes(bytes)  evict keys until so many bytes are free
    remove(key)         remove a key for another reason, without a ghost

**What mutates.** Every method except the queries changes the policy and nothing else. The policy keeps
references to keys only.

**When a key must be pinned.** Pin a key while its bytes are read, because the caller may reuse the bytes of
an evicted key at once. `evict` never returns a pinned key. Pins are not counted: a caller with several
readers pins the key for the first and unpins it after the last. `unpin` ranks the key as the latest used.

**What is unsafe.** A policy is not thread-safe. The sum of admitted bytes must stay within the capacity, so
evict before you admit.

All limits are in bytes, because chunks differ in size. A ghost counts with the bytes of its former chunk,
which limits the number of ghosts. Methods take constant time; in S3-FIFO, `evict` does on average.

**Cold keys.** The caller may say of a key that its chunk is probably useless, in `admit` or with `make_cold`.
All policies evict these *cold* keys first, and keep no ghosts of them. A use makes a key warm again: `touch`
and `make_newest` place it as a new key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from kvferry.tiers.eviction.queue import ByteQueue, check_disjoint


class EvictionPolicy(ABC):
    """A policy that chooses the chunks to evict when a tier is full. It ranks the keys of the chunks.

    Every admitted key is in one of the policy's *resident* queues, and `evict` chooses among these keys. The
    other queues hold *ghosts*, which are remembered keys of evicted chunks. A subclass decides which queue a
    key enters, where the key moves on a use, and which key is evicted. Cold keys, which are evicted before
    all others, are in a queue of this class.

    Attributes:
        capacity_bytes: maximum total bytes of the chunks whose keys are admitted.
    """

    def __init__(
        self, capacity_bytes: int, resident: Sequence[ByteQueue], ghosts: Sequence[ByteQueue] = ()
    ) -> None:
        """Create a policy without keys.

        Args:
            capacity_bytes: maximum total bytes of the chunks whose keys are admitted.
            resident: empty queues of the subclass for admitted keys.
            ghosts: empty queues of the subclass for remembered keys of evicted chunks.
        """
        self.capacity_bytes = capacity_bytes
        self._cold = ByteQueue()
        self._warm, self._ghost_queues = resident, ghosts
        self._resident = (*resident, self._cold)
        self._queues = (*self._resident, *ghosts)

    @property
    def used_bytes(self) -> int:
        """Total bytes of the chunks whose keys are admitted, pinned or not."""
        return sum(queue.total for queue in self._resident)

    def __len__(self) -> int:
        """Return the number of admitted keys, pinned or not."""
        return sum(map(len, self._resident))

    def __contains__(self, key: object) -> bool:
        """Return whether the key is admitted: added by `admit`, and neither evicted nor removed since."""
        return any(key in queue for queue in self._resident)

    def admit(self, key: bytes, size: int, *, cold: bool = False) -> None:
        """Add the key of a chunk to the policy, initially unpinned. The policy evicts nothing to make room.

        Args:
            key: key of a chunk.
            size: bytes of the chunk.
            cold: True to evict the key before all others, until it is used.

        Raises:
            ValueError: the key is admitted already, `size` is not positive, or the chunk does not fit into
                the capacity beside the chunks of the admitted keys.
        """
        if key in self:
            raise ValueError(f"key {key.hex()} is admitted already")
        if not 0 < size <= self.capacity_bytes - self.used_bytes:
            raise ValueError(
                f"{size} bytes for key {key.hex()}, but {self.used_bytes} of {self.capacity_bytes} are used; "
                "evict before admitting"
            )
        if cold:
            self._place_cold((key,), size)
        else:
            self._place(key, size)

    def admit_all(self, keys: Sequence[bytes], size: int, *, cold: bool = False) -> None:
        """Add the keys of chunks of equal size, in this order, as `admit` does.

        Args:
            keys: different keys of chunks.
            size: bytes of each chunk.
            cold: True to evict the keys before all others, until they are used.

        Raises:
            ValueError: a key is admitted already, or the chunks do not fit into the capacity beside the
                chunks of the admitted keys. Nothing has changed then.
        """
        for queue in self._resident:
            if queue.has_any(keys):
                raise ValueError(f"one of {len(keys)} keys is admitted already")
        if size * len(keys) > self.capacity_bytes - self.used_bytes:
            raise ValueError(
                f"{len(keys)} chunks of {size} bytes, but {self.used_bytes} of {self.capacity_bytes} are used"
                "; evict before admitting"
            )
        if cold:
            self._place_cold(keys, size)
        else:
            self._place_all(keys, size)

    def touch(self, key: bytes) -> None:
        """Record that the chunk of a key was used. Raises KeyError if the key is not admitted."""
        self._make_warm((key,))
        self._touch(key)

    def touch_all(self, keys: Sequence[bytes]) -> None:
        """Record a use of each chunk, and make the keys the newest of their queues. The last is newest.

        Raises:
            KeyError: a key is not admitted.
        """
        for key in keys:
            self.touch(key)
        self.make_newest(keys)

    def make_newest(self, keys: Sequence[bytes]) -> None:
        """Make keys the newest of their queues, without counting uses of their chunks. The last is newest.

        A cold key becomes warm. A pinned key becomes the newest when it is unpinned. Keys that are not
        admitted are skipped.

        Args:
            keys: keys of chunks, in any queues.
        """
        self._make_warm(keys)
        for queue in self._warm:
            queue.make_newest_of(keys)

    def make_cold(self, keys: Iterable[bytes]) -> None:
        """Evict these keys before all keys that are not cold, until they are used. The last is evicted last.

        Keys that are cold already keep their places, and keys that are not admitted are skipped.

        Args:
            keys: keys of chunks, in any queues, pinned or not.
        """
        for key in keys:
            if any(key in queue for queue in self._warm):
                self._move(key, self._cold.push)

    def pin(self, key: bytes) -> None:
        """Exclude a key from eviction. Raises KeyError if the key is not admitted or already pinned."""
        self._queue_of(key).pin(key)

    def unpin(self, key: bytes) -> None:
        """Allow the eviction of a pinned key again. Raises KeyError if the key is not pinned."""
        self._queue_of(key).unpin(key)

    def pin_all(self, keys: Iterable[bytes]) -> None:
        """Exclude keys from eviction, as `pin` does for each."""
        for key in keys:
            self.pin(key)

    def unpin_all(self, keys: Iterable[bytes]) -> None:
        """Allow the eviction of pinned keys again, in this order, as `unpin` does for each."""
        for key in keys:
            self.unpin(key)

    def remove(self, key: bytes) -> int:
        """Remove a key, pinned or not. The key is not remembered as evicted. Return the bytes of its chunk.

        Raises:
            KeyError: the key is not admitted.
        """
        return self._queue_of(key).remove(key)

    def evict(self) -> bytes | None:
        """Choose a key to evict, remove it from the policy, and return it; None if all keys are pinned."""
        return self._cold.pop()[0] if self._cold.unpinned else self._evict_warm()

    def oldest(self, size: int) -> list[bytes] | None:
        """Return the keys that `evict_bytes` would evict, and change nothing; None if the policy cannot tell.

        Args:
            size: bytes of all chunks of the keys together.
        """
        del size
        return None

    def evict_bytes(self, size: int) -> list[bytes]:
        """Evict keys as `evict` does, until their chunks have `size` bytes together or none can be evicted.

        Returns:
            The evicted keys.
        """
        until, keys = self.used_bytes - size, self._cold.pop_bytes(size)
        return keys + self._evict_warm_bytes(self.used_bytes - until)

    def check_integrity(self) -> None:
        """Check that all queues are consistent, and that the chunks fit into the capacity.

        The time is proportional to the number of keys.

        Raises:
            AssertionError: a check fails; the message describes the inconsistency.
        """
        check_disjoint(self._queues)
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are admitted, capacity is {self.capacity_bytes}")

    @abstractmethod
    def _touch(self, key: bytes) -> None:
        """Record a use of the chunk of a key that is not cold. Raises KeyError if the key is not admitted."""

    @abstractmethod
    def _evict_warm(self) -> bytes | None:
        """Evict a key that is not cold, and return it; None if all such keys are pinned."""

    def _evict_warm_bytes(self, size: int) -> list[bytes]:
        """Evict keys that are not cold until their chunks have `size` bytes together. Return the keys."""
        until, keys = self.used_bytes - size, list[bytes]()
        while self.used_bytes > until and (key := self._evict_warm()) is not None:
            keys.append(key)
        return keys

    @abstractmethod
    def _place(self, key: bytes, size: int) -> None:
        """Put a newly admitted key into a queue. If an earlier eviction of the key is remembered, forget it.

        The caller has checked that the chunk fits into the capacity.

        Args:
            key: key of the chunk.
            size: bytes of the chunk.
        """

    def _place_all(self, keys: Iterable[bytes], size: int) -> None:
        """Put newly admitted keys into queues, as `_place` does for each.

        Args:
            keys: keys of chunks.
            size: bytes of each chunk.
        """
        for key in keys:
            self._place(key, size)

    def _place_cold(self, keys: Sequence[bytes], size: int) -> None:
        """Make newly admitted keys cold, and forget earlier evictions of them.

        Args:
            keys: keys of chunks.
            size: bytes of each chunk.
        """
        for queue in self._ghost_queues:
            queue.remove_all(keys)
        self._cold.push_all(keys, size)

    def _make_warm(self, keys: Iterable[bytes]) -> None:
        """Place those of the keys that are cold as new keys."""
        if len(self._cold):
            for key in keys:
                if key in self._cold:
                    self._move(key, self._place)

    def _move(self, key: bytes, place: Callable[[bytes, int], None]) -> None:
        """Take a key out of its queue and place it anew. A pinned key stays pinned."""
        pinned = self._queue_of(key).is_pinned(key)
        place(key, self.remove(key))
        if pinned:
            self.pin(key)

    def _queue_of(self, key: bytes) -> ByteQueue:
        """Return the queue that contains an admitted key. Raises KeyError if the key is not admitted."""
        for queue in self._resident:
            if key in queue:
                return queue
        raise KeyError(key)
