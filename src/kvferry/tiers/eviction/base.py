"""The base class of eviction policies: their contract, and the code that all policies share.

A policy ranks keys. It neither stores nor frees the chunks. The tier reports what happens to each key, and
the policy chooses the key to evict. Some policies remember an evicted key as a *ghost*, without its chunk.

Pin a key while its bytes are read, because the caller may reuse the bytes of an evicted key at once. `evict`
never returns a pinned key. Pins are not counted: a caller with several readers pins the key for the first and
unpins it after the last. `unpin` ranks the key as the latest used, if the policy ranks by queues.

The caller may announce a chunk with `expect` before it makes room and admits it. A policy that shares the
capacity among tenants counts the chunk from then on, and evicts for its tenant.

A policy is not thread-safe, and keeps references to keys only. The sum of admitted bytes must stay within the
capacity, so evict before you admit.

All limits are in bytes, because chunks differ in size. A ghost counts with the bytes of its former chunk,
which limits the number of ghosts. Methods take constant time, in some policies on average.

The caller may say that the chunk of a key is probably useless. All policies evict such *cold* keys first, and
keep no ghosts of them. A use makes a key warm again: `touch` and `make_newest` place it as a new key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvferry.tiers.tenants import TenantUsage


class ByteQueue:
    """A queue of chunk keys and the sizes of their chunks, from the oldest to the newest key.

    A pinned key has no place in the order, but its chunk counts in `total`, the bytes of all chunks. Methods
    of one key raise KeyError if the key is not in the queue, `pin` also for a pinned and `unpin` for an
    unpinned key.
    """

    def __init__(self) -> None:
        self.total = 0
        self._unpinned: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._unpinned) + len(self._pinned)

    def __contains__(self, key: object) -> bool:
        return key in self._unpinned or key in self._pinned

    def __iter__(self) -> Iterator[bytes]:
        yield from self._unpinned
        yield from self._pinned

    def is_pinned(self, key: bytes) -> bool:
        return key in self._pinned

    @property
    def unpinned(self) -> int:
        return len(self._unpinned)

    def push(self, key: bytes, size: int) -> None:
        """Add a key as the newest. It must not be in the queue yet."""
        self._unpinned[key] = size
        self.total += size

    def known(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of the keys that are in the queue."""
        unpinned, pinned = self._unpinned, self._pinned
        return [key for key in keys if key in unpinned or key in pinned]

    def sizes(self, keys: Iterable[bytes], *, with_pinned: bool = True) -> list[int]:
        """Return the bytes of each key's chunk; 0 for a pinned key unless `with_pinned`."""
        if not self._pinned:
            return list(map(self._unpinned.__getitem__, keys))
        unpinned, pinned = self._unpinned, self._pinned
        return [unpinned[key] if key in unpinned else pinned[key] * with_pinned for key in keys]

    def take(self, key: bytes) -> int | None:
        """Remove a key that is not pinned, and return its size; None if there is no such key."""
        if (size := self._unpinned.pop(key, None)) is not None:
            self.total -= size
        return size

    def push_all(self, keys: Iterable[bytes], size: int) -> None:
        """Add keys of chunks of `size` bytes each, the last as the newest. None may be in the queue yet."""
        before = len(self._unpinned)
        self._unpinned.update(dict.fromkeys(keys, size))
        self.total += (len(self._unpinned) - before) * size

    def has_any(self, keys: Iterable[bytes]) -> bool:
        unpinned, pinned = self._unpinned.keys(), self._pinned.keys()
        return bool((unpinned and not unpinned.isdisjoint(keys)) or (pinned and not pinned.isdisjoint(keys)))

    def pop(self) -> tuple[bytes, int]:
        """Remove the oldest unpinned key, and return it and its size; KeyError if there is none."""
        key, size = self._unpinned.popitem(last=False)
        self.total -= size
        return key, size

    def pop_bytes(self, size: int) -> list[bytes]:
        """Remove the oldest unpinned keys until their chunks have `size` bytes, or there are no more."""
        # Local names: a simulation evicts millions of keys here.
        unpinned, pop, keys, until = self._unpinned, self._unpinned.popitem, list[bytes](), self.total - size
        total = self.total
        while total > until and unpinned:
            key, freed = pop(last=False)
            total -= freed
            keys.append(key)
        self.total = total
        return keys

    def oldest(self, size: int) -> tuple[list[bytes], int]:
        """Return the keys that `pop_bytes` would remove, and the total bytes of their chunks."""
        found, total = list[bytes](), 0
        for key, each in self._unpinned.items():
            if total >= size:
                break
            found.append(key)
            total += each
        return found, total

    def remove(self, key: bytes) -> int:
        """Remove a key, pinned or not. Return its size."""
        size = self._unpinned.pop(key) if key in self._unpinned else self._pinned.pop(key)
        self.total -= size
        return size

    def remove_all(self, keys: Iterable[bytes]) -> None:
        """Remove those of the keys that are in the queue and not pinned."""
        for key in keys:
            if key in self._unpinned:
                self.remove(key)

    def make_newest(self, key: bytes) -> None:
        """Make a key the newest of the queue. A pinned key becomes the newest when it is unpinned."""
        if key not in self._pinned:
            self._unpinned.move_to_end(key)

    def make_newest_of(self, keys: Iterable[bytes]) -> None:
        """Make those of the keys that are in the queue and not pinned its newest, in their order."""
        unpinned, move = self._unpinned, self._unpinned.move_to_end
        for key in keys:
            if key in unpinned:
                move(key)

    def pin(self, key: bytes) -> None:
        self._pinned[key] = self._unpinned.pop(key)

    def unpin(self, key: bytes) -> None:
        """Put a pinned key back into the order, as the newest."""
        self._unpinned[key] = self._pinned.pop(key)

    def move(self, key: bytes, to: ByteQueue) -> None:
        """Move a key to another queue, as the newest key there. A pinned key stays pinned."""
        pinned = key in self._pinned
        to.push(key, self.remove(key))
        if pinned:
            to.pin(key)

    def trim(self, most: int) -> None:
        """Remove the oldest keys until at most `most` bytes are left. No key may be pinned."""
        while self.total > most:
            self.pop()

    def check_integrity(self) -> None:
        found = sum(self._unpinned.values()) + sum(self._pinned.values())
        if found != self.total:
            raise AssertionError(f"a queue of {found} bytes says {self.total}")
        if both := self._unpinned.keys() & self._pinned.keys():
            raise AssertionError(f"{len(both)} keys are pinned and in the queue")


class EvictionPolicy(ABC):
    """A policy that chooses the chunks to evict when a tier is full.

    Every admitted key is in a *resident* queue. A subclass decides which queue a key enters, where the key
    moves on a use, and which key is evicted.
    """

    def __init__(
        self, capacity_bytes: int, resident: Sequence[ByteQueue], ghosts: Sequence[ByteQueue] = ()
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._cold = ByteQueue()
        self._warm, self._ghost_queues = resident, ghosts
        self._resident = (*resident, self._cold)
        self._queues = (*self._resident, *ghosts)

    @property
    def used_bytes(self) -> int:
        return sum(queue.total for queue in self._resident)

    def __len__(self) -> int:
        return sum(map(len, self._resident))

    def __contains__(self, key: object) -> bool:
        """Return whether the key is admitted: added, and neither evicted nor removed since."""
        return any(key in queue for queue in self._resident)

    def admit(self, key: bytes, size: int, *, cold: bool = False) -> None:
        """Add a key of a chunk of `size` bytes, unpinned. Nothing is evicted for it.

        Raise ValueError if it is admitted already, or the chunk does not fit into the capacity now.
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
        """Add different keys of equal size as `admit` does, or raise ValueError and change nothing."""
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

    def expect(self, key: bytes, size: int) -> None:
        """Count a chunk of `size` bytes that is being stored. `admit` or `unexpect` ends that."""
        del key, size

    def unexpect(self, key: bytes) -> None:
        """Forget an expected chunk that is not stored after all."""
        del key

    @property
    def is_over_limit(self) -> bool:
        """True if chunks must be evicted for the chunk that was expected last, although there may be room."""
        return False

    def may_evict(self, keys: Iterable[bytes]) -> bool:
        """Return False if keys should stay, whatever their rank, for the chunk that was expected last."""
        del keys
        return True

    @property
    def tenants(self) -> Mapping[str, TenantUsage]:
        """Usage by the labels of tenants; empty if the policy does not tell them apart."""
        return {}

    def touch(self, key: bytes) -> None:
        """Record a use of a key. Raises KeyError if it is not admitted."""
        self._make_warm((key,))
        self._touch(key)

    def touch_all(self, keys: Sequence[bytes]) -> None:
        """Record a use of each key, and make the keys the newest of their queues, the last one newest."""
        for key in keys:
            self.touch(key)
        self.make_newest(keys)

    def make_newest(self, keys: Sequence[bytes]) -> None:
        """Make keys, warm or cold, warm and newest of their queues, the last one newest. Count no use."""
        self._make_warm(keys)
        for queue in self._warm:
            queue.make_newest_of(keys)

    def mark_used(self, keys: Sequence[bytes], tokens: int = 0) -> None:
        """Rank the chunks of a request that has ended as the latest used, its first one as the very latest.

        Args:
            keys: keys of the prefix, in its order. Those that are not admitted are skipped.
            tokens: length of the prefix.
        """
        del tokens
        self.make_newest(keys[::-1])

    def make_cold(self, keys: Iterable[bytes]) -> None:
        """Make admitted keys cold, the last evicted last. Keys that are cold already keep their places."""
        for key in keys:
            if key in self and key not in self._cold:
                self._move(key, self._cold.push)

    def pin(self, key: bytes) -> None:
        """Exclude a key from eviction, or raise KeyError if it is not admitted or already pinned."""
        self._queue_of(key).pin(key)

    def unpin(self, key: bytes) -> None:
        """Allow the eviction of a pinned key again. Raises KeyError if the key is not pinned."""
        self._queue_of(key).unpin(key)

    def pin_all(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.pin(key)

    def unpin_all(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.unpin(key)

    def remove(self, key: bytes) -> int:
        """Remove a key, pinned or not, without a ghost. Return the bytes of its chunk."""
        return self._queue_of(key).remove(key)

    def evict(self) -> bytes | None:
        """Choose a key to evict, remove it from the policy, and return it; None if all keys are pinned."""
        return self._cold.pop()[0] if self._cold.unpinned else self._evict_warm()

    def oldest(self, size: int) -> list[bytes] | None:
        """Return the keys that `evict_bytes(size)` would evict; None if the policy cannot tell."""
        del size
        return None

    def evict_bytes(self, size: int) -> list[bytes]:
        """Evict keys as `evict` does, until their chunks have `size` bytes or none can be evicted."""
        until, keys = self.used_bytes - size, self._cold.pop_bytes(size)
        return keys + self._evict_warm_bytes(self.used_bytes - until)

    def check_integrity(self) -> None:
        """Check that queues are consistent and fit into the capacity, or raise AssertionError: O(keys)."""
        seen: set[bytes] = set()
        for queue in self._queues:
            queue.check_integrity()
            for key in queue:
                if key in seen:
                    raise AssertionError(f"key {key.hex()} is in two queues")
                seen.add(key)
        if self.used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self.used_bytes} bytes are admitted, capacity is {self.capacity_bytes}")

    @abstractmethod
    def _touch(self, key: bytes) -> None:
        """Record a use of a key that is not cold. Raises KeyError if the key is not admitted."""

    @abstractmethod
    def _evict_warm(self) -> bytes | None:
        """Evict a key that is not cold, and return it; None if all such keys are pinned."""

    def _evict_warm_bytes(self, size: int) -> list[bytes]:
        until, keys = self.used_bytes - size, list[bytes]()
        while self.used_bytes > until and (key := self._evict_warm()) is not None:
            keys.append(key)
        return keys

    @abstractmethod
    def _place(self, key: bytes, size: int) -> None:
        """Put a newly admitted key into a queue, and forget its ghost. The caller has checked the size."""

    def _place_all(self, keys: Iterable[bytes], size: int) -> None:
        for key in keys:
            self._place(key, size)

    def _place_cold(self, keys: Sequence[bytes], size: int) -> None:
        for queue in self._ghost_queues:
            queue.remove_all(keys)
        self._cold.push_all(keys, size)

    def _make_warm(self, keys: Iterable[bytes]) -> None:
        if self._cold.total:
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
        for queue in self._resident:
            if key in queue:
                return queue
        raise KeyError(key)
